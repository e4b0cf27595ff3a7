// This level's table of entry points. The functions are defined in the other sources of this folder.
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {

#define TIERCEL_STRING_(x) #x
#define TIERCEL_STRING(x) TIERCEL_STRING_(x)

extern const KernelTable table;
const KernelTable table = {
    TIERCEL_STRING(TIERCEL_LEVEL),
    linear,
    linear_start,
    embed,
    quantize,
    norm,
    gated,
    rope_table,
    rope_kv,
    attention,
    select_rows,
    softcap,
    add,
    argmax,
    probe,
    router,
    experts,
    latent_kv,
    head_rotate,
    head_linear,
    sigmoid_gate,
    short_conv,
    delta_rule,
    gated_norm,
    delta_layer,
    layer_norm,
    activate,
    sequence_attention,
    residual_mix,
    ssd,
    gate_norm,
    block_conv,
    scale,
    row_products,
    exp_sum,
};

} // namespace tiercel::TIERCEL_LEVEL
