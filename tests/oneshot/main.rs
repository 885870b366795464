//! One-shot compression as its users see it, on a small Llama and on single layers.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

#[path = "../../examples/llama_compress/check.rs"]
mod check;
#[path = "../../examples/llama_compress/checkpoint.rs"]
#[allow(dead_code)]
mod checkpoint;
#[path = "../../examples/llama_compress/evaluate.rs"]
#[allow(dead_code)]
mod evaluate;
#[path = "../../examples/llama_compress/finetune.rs"]
mod finetune;
#[path = "../../examples/llama_compress/llama.rs"]
#[allow(dead_code)]
mod llama;
#[path = "../../examples/llama_compress/pretrained.rs"]
mod pretrained;

mod blocks;
mod checkpoints;
mod checks;
mod distilled;
mod expected;
mod file;
mod folders;
mod forward_passes;
mod kv_cache;
mod methods;
mod prepared;
mod presets;
mod refuses;
mod resume;
mod rounded;
mod row_order;
mod scaling;
mod streamed;
mod unseen;
mod zeros_with_codes;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use llama::{Llama, Sizes};
use support::{Parameter, parameters, values, with_numbers};

/// Two blocks, grouped-query attention, a tied head.
pub(crate) const SMALL: Sizes = Sizes {
    vocabulary: 24,
    width: 16,
    hidden: 20,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    positions: 16,
    own_head: false,
    rope_theta: llama::ROPE_THETA,
    rope_scaling: None,
    norm_epsilon: llama::NORM_EPSILON,
};

pub(crate) fn small_llama(device: &Device) -> Llama {
    with_numbers(SMALL.init(device), 11)
}

/// Four windows of tokens, in two batches of another size.
pub(crate) fn tokens(device: &Device) -> Vec<Tensor<2, Int>> {
    let window = |count: i64, salt: i64| {
        let numbers = Tensor::<1, Int>::arange(0..count * 16, device);
        let squares = numbers.clone() * numbers * 7 + salt;
        squares.remainder_scalar(23).reshape([count as usize, 16])
    };
    vec![window(6, 3), window(2, 5)]
}

/// Root mean square of the difference of logits.
pub(crate) fn logit_error(one: &Llama, other: &Llama, device: &Device) -> f32 {
    let mut sum = (0.0, 0);
    for batch in tokens(device) {
        let (a, b) = (
            values(one.forward(batch.clone())),
            values(other.forward(batch)),
        );
        sum.0 += a
            .iter()
            .zip(&b)
            .map(|(a, b)| (a - b) * (a - b))
            .sum::<f32>();
        sum.1 += a.len();
    }
    (sum.0 / sum.1 as f32).sqrt()
}

pub(crate) fn parameter<M: Module>(model: &M, path: &str) -> Parameter {
    let found = parameters(model).into_iter().find(|one| one.path == path);
    found.unwrap_or_else(|| panic!("no `{path}`"))
}
