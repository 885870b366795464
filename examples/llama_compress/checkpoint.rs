//! Checkpoints and token windows from safetensors files.

use std::error::Error;
use std::path::Path;

use burn::store::{ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore};
use burn::tensor::{Device, Tensor};
use safetensors::SafeTensors;

use super::llama::{Llama, Sizes};

/// Names of Hugging Face's models, and those of the module here.
const NAMES: [(&str, &str); 12] = [
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^model\.layers\.", "layers."),
    (r"^model\.norm\.", "norm."),
    (r"^lm_head\.", "output."),
    (r"\.self_attn\.q_proj\.", ".attention.wq."),
    (r"\.self_attn\.k_proj\.", ".attention.wk."),
    (r"\.self_attn\.v_proj\.", ".attention.wv."),
    (r"\.self_attn\.o_proj\.", ".attention.wo."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.input_layernorm\.", ".attention_norm."),
];

/// Loads a checkpoint with the names of Hugging Face or of Meta. The numbers of heads come from the
/// file's metadata (`n_heads`, `n_kv_heads`) where it has them.
pub(crate) fn load(
    path: &Path,
    heads: Option<usize>,
    positions: usize,
    device: &Device,
) -> Result<Llama, Box<dyn Error>> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let bytes = std::fs::read(path).map_err(|error| named(&error))?;
    let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| named(&error))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| named(&error))?;
    let find = |ends: [&str; 2]| -> Result<Vec<usize>, String> {
        let mut names: Vec<&str> = file.names().into_iter().collect();
        names.sort();
        let name = names
            .into_iter()
            .find(|name| ends.iter().any(|end| name.ends_with(end)));
        let name = name.ok_or_else(|| named(&format!("no tensor ends in {}", ends[0])))?;
        Ok(file
            .tensor(name)
            .map_err(|error| named(&error))?
            .shape()
            .to_vec())
    };
    let embedding = find(["tok_embeddings.weight", "embed_tokens.weight"])?;
    let hidden = find(["w1.weight", "gate_proj.weight"])?[0];
    let query = find(["wq.weight", "q_proj.weight"])?[0];
    let key = find(["wk.weight", "k_proj.weight"])?[0];
    let number =
        |name: &str| -> Option<usize> { metadata.metadata().as_ref()?.get(name)?.parse().ok() };
    let heads = heads.or_else(|| number("n_heads"));
    let heads = heads.ok_or_else(|| {
        named(&"the number of attention heads is not in its metadata: give --heads")
    })?;
    if heads == 0 || !query.is_multiple_of(heads) || !key.is_multiple_of(query / heads) {
        return Err(named(&format!(
            "{heads} heads do not divide {query} and {key} features"
        ))
        .into());
    }
    let names = file.names();
    let is_hugging_face = names.iter().any(|name| name.contains("self_attn"));
    let layers = names
        .iter()
        .filter(|name| name.ends_with("wq.weight") || name.ends_with("q_proj.weight"));
    let sizes = Sizes {
        vocabulary: embedding[0],
        width: embedding[1],
        hidden,
        layers: layers.count(),
        heads,
        kv_heads: key / (query / heads),
        positions: number("max_seq_len").unwrap_or(positions).max(positions),
        own_head: names
            .iter()
            .any(|name| matches!(*name, "output.weight" | "lm_head.weight")),
    };
    let mut model = sizes.init(device);
    let mut store = SafetensorsStore::from_file(path).with_from_adapter(PyTorchToBurnAdapter);
    for (from, to) in NAMES {
        store = store.with_key_remapping(from, to);
    }
    store = store.with_key_remapping(r"\.post_attention_layernorm\.", ".ffn_norm.");
    let applied = model.load_from(&mut store).map_err(|error| named(&error))?;
    if !applied.missing.is_empty() {
        return Err(named(&format!("it has no {:?}", applied.missing)).into());
    }
    Ok(match is_hugging_face {
        true => model.map_rotated(in_pairs),
        false => model,
    })
}

/// Hugging Face rotates the first half of a head with the second; Burn, and Meta, neighbours.
fn in_pairs(weight: Tensor<2>, heads: usize) -> Tensor<2> {
    let [inputs, outputs] = weight.dims();
    weight
        .reshape([inputs, heads, 2, outputs / heads / 2])
        .swap_dims(2, 3)
        .reshape([inputs, outputs])
}

/// Windows of tokens.
pub(crate) struct Windows {
    pub(crate) length: usize,
    pub(crate) tokens: Vec<i32>,
}

impl Windows {
    pub(crate) fn count(&self) -> usize {
        self.tokens.len() / self.length
    }

    /// Windows `[windows, length]` of I32 in a safetensors file.
    pub(crate) fn load(path: &Path, name: &str) -> Result<Self, Box<dyn Error>> {
        let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let bytes = std::fs::read(path).map_err(|error| named(&error))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| named(&error))?;
        let tensor = file.tensor(name).map_err(|error| named(&error))?;
        let (&[_, length], safetensors::Dtype::I32) = (tensor.shape(), tensor.dtype()) else {
            return Err(named(&format!("`{name}` is not [windows, tokens] of I32")).into());
        };
        let numbers = tensor.data().chunks_exact(4);
        Ok(Self {
            length,
            tokens: numbers
                .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        })
    }
}
