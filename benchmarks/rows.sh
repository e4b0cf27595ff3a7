#!/bin/sh
# Makes every row of issue 3's table, in order, one command each, printed before it runs. A peer whose variable is not
# set is left out; one whose environment is not there is named in the row and left out.
#
#   LLAMA_CPP=llama-venv/bin/python IK_LLAMA=ik-venv/bin/python VLLM_CPU=vllm-venv/bin/python \
#   OPENVINO_GENAI=ov-venv/bin/python OPENVINO_MODEL=smollm2-openvino-int8 FLOATS=SmolLM2-135M-Instruct \
#   benchmarks/rows.sh [CASE...]
#
# LLAMA_CPP, IK_LLAMA, OPENVINO_GENAI, VLLM_CPU, TRANSFORMERS_CPU: interpreters of the peers' virtual environments.
# OPENVINO_MODEL: the folder it exported. FLOATS: a folder of f32 safetensors of the same model; BF16: one of bf16.
# SYNTHETIC: a folder for models with random weights (up to 2.3 GB, removed again); PYTHON: what writes them.
# TIERCEL: our command (default: tiercel). RESULTS: where rows go (default: benchmarks/results). RUN: put before each
# command, to run it on a quiet machine, say. With names of cases, only those are made. The machine must be quiet.
set -u
cd "$(dirname "$0")/.." || exit 2
TIERCEL=${TIERCEL:-tiercel}
RESULTS=${RESULTS:-benchmarks/results}
wanted=" $* "
n_missed=0
missed=

is_wanted() { [ "$wanted" = "  " ] || [ "${wanted#* "$1" }" != "$wanted" ]; }

# row BENCH CASE FLAGS...: makes one row, if it is wanted.
row() {
  bench=$1 case=$2
  shift 2
  is_wanted "$case" || return
  echo "+ $TIERCEL bench $bench --case $case $* --output $RESULTS/$bench.jsonl"
  # shellcheck disable=SC2086 # TIERCEL and RUN are words
  if ! ${RUN:-} $TIERCEL bench "$bench" --case "$case" "$@" --output "$RESULTS/$bench.jsonl"; then
    n_missed=$((n_missed + 1)) missed="$missed $case"
  fi
}

# synthetic NAME CASE...: makes the model's rows; writes it before and removes it afterwards, unless it is there.
synthetic() {
  name=$1 made=
  shift
  for one in "$@"; do
    is_wanted "$one" || continue
    if [ ! -d "$SYNTHETIC/$name" ]; then
      made=yes
      ${PYTHON:-python} benchmarks/synthetic.py "$name" "$SYNTHETIC/$name" || return
    fi
    row ops "$one" -m "$SYNTHETIC/$name"
  done
  [ -z "$made" ] || rm -rf "${SYNTHETIC:?}/$name"
}

llama= ik= openvino= vllm= transformers=
[ -n "${LLAMA_CPP:-}" ] && llama="--peer llama_cpp=$LLAMA_CPP"
[ -n "${IK_LLAMA:-}" ] && ik="--peer ik_llama=$IK_LLAMA"
[ -n "${OPENVINO_GENAI:-}" ] &&
  openvino="--peer openvino_genai=$OPENVINO_GENAI --peer-model openvino_genai=${OPENVINO_MODEL:?the folder it exported}"
[ -n "${VLLM_CPU:-}" ] && vllm="--peer vllm_cpu=$VLLM_CPU"
[ -n "${TRANSFORMERS_CPU:-}" ] && transformers="--peer transformers_cpu=$TRANSFORMERS_CPU"

# shellcheck disable=SC2086 # a peer is two or four words, or none
{
  row latency decode-smollm2 $llama $ik $openvino
  row ops decode-ops-smollm2
  row latency prefill-smollm2 $llama $ik $openvino
  row ops prefill-ops-smollm2
  row latency prefill-2048-smollm2 $openvino
  row latency prefill-2048-int8-smollm2 $openvino
  row throughput batch8-smollm2 $openvino
  row throughput batch32-smollm2 $openvino
  row latency decode-gemma3 $llama
  row latency prefill-gemma3 $llama
  if [ -n "${FLOATS:-}" ]; then
    row ops decode-ops-floats -m "$FLOATS"
    row latency decode-floats -m "$FLOATS" $vllm $transformers
    row ops prefill-ops-floats -m "$FLOATS"
    row latency prefill-floats -m "$FLOATS" $vllm $transformers
  else
    echo "# FLOATS is not set: the rows of bf16 and f32 safetensors are left out"
  fi
  if [ -n "${BF16:-}" ]; then
    row ops decode-ops-bf16 -m "$BF16"
    row ops prefill-ops-bf16 -m "$BF16"
    for one in edit extract draft-model dspark dspark-open dflash2 first-token; do row latency "speculative-$one-bf16" -m "$BF16"; done
  else
    echo "# BF16 is not set: the rows of bf16 safetensors are left out"
  fi
  if [ -n "${SYNTHETIC:-}" ]; then
    synthetic gdn decode-ops-gdn prefill-ops-gdn
    synthetic kda decode-ops-kda prefill-ops-kda
    synthetic mla decode-ops-mla
    synthetic moe decode-ops-moe
    synthetic moe-4b decode-ops-moe-4b
  else
    echo "# SYNTHETIC is not set: the rows of models with random weights are left out"
  fi
  row startup startup-smollm2 $llama
  for one in edit extract chat chat8 first-token dspark dflash2; do row latency "speculative-$one-smollm2"; done
  row latency overhead-1-smollm2
  row throughput overhead-32-smollm2
  row throughput structured32-smollm2
  row served served32-smollm2
  row context context-4096-smollm2
}
echo "# $n_missed rows missed a target of a gate, or a peer:$missed"
