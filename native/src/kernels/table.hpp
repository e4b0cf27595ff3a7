// The entry points every level defines, one declaration each. Included by kernel sources only.
#pragma once

#include "tiercel/kernels.hpp"

namespace tiercel::TIERCEL_LEVEL {

// linear_*.cpp, quantize.cpp
void linear(const LinearArgs&, const ThreadCtx&);
WeightRun linear_start(const LinearArgs&, const ThreadCtx&);
void embed(const EmbedArgs&, const ThreadCtx&);
void quantize(const QuantizeArgs&, const ThreadCtx&);
// Rounds one row x[0..k) to int8 groups at out (one QuantRows row). For use inside fused kernels.
void quantize_row(const float* x, int64_t k, uint8_t* out);
// The same for columns begin..end of it, multiples of 32.
void quantize_columns(const float* x, int64_t begin, int64_t end, uint8_t* out);

// rows.cpp
void norm(const NormArgs&, const ThreadCtx&);
void gated(const GatedArgs&, const ThreadCtx&);
void rope_table(const RopeTableArgs&, const StepView&, const ThreadCtx&);
void rope_kv(const RopeKvArgs&, const StepView&, const ThreadCtx&);
void select_rows(const SelectRowsArgs&, const StepView&, const ThreadCtx&);
void softcap(const SoftcapArgs&, const ThreadCtx&);
void add(const AddArgs&, const ThreadCtx&);
int64_t argmax(const float* x, int64_t n);

// probe.cpp
float probe(Probe kind, const uint8_t* data, int64_t n);

// router.cpp, experts.cpp
void router(const RouterArgs&, const ThreadCtx&);
void experts(const ExpertsArgs&, const ThreadCtx&);
// recurrent.cpp
void short_conv(const ShortConvArgs&, const StepView&, const ThreadCtx&);
void delta_rule(const DeltaRuleArgs&, const StepView&, const ThreadCtx&);
void gated_norm(const GatedNormArgs&, const ThreadCtx&);
void delta_layer(const DeltaLayerArgs&, const StepView&, const ThreadCtx&);

// ssd.cpp
void ssd(const SsdArgs&, const StepView&, const ThreadCtx&);
void gate_norm(const GateNormArgs&, const ThreadCtx&);

// attention.cpp
void attention(const AttentionArgs&, const StepView&, const ThreadCtx&);

// latent.cpp
void latent_kv(const LatentKvArgs&, const StepView&, const ThreadCtx&);
void head_rotate(const HeadRotateArgs&, const ThreadCtx&);
void head_linear(const HeadLinearArgs&, const ThreadCtx&);
void sigmoid_gate(const SigmoidGateArgs&, const ThreadCtx&);

// encoder.cpp
void layer_norm(const LayerNormArgs&, const ThreadCtx&);
void activate(const ActivateArgs&, const ThreadCtx&);
void sequence_attention(const SequenceAttentionArgs&, const StepView&, const ThreadCtx&);

// residual_mix.cpp
void residual_mix(const ResidualMixArgs&, const ThreadCtx&);

// draft.cpp
void block_conv(const BlockConvArgs&, const StepView&, const ThreadCtx&);
void scale(const ScaleArgs&, const ThreadCtx&);
void row_products(const float* rows, int64_t n, int64_t k, const float* x, float* y);
float exp_sum(const float* x, int64_t n, float largest);

} // namespace tiercel::TIERCEL_LEVEL
