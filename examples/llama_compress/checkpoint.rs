//! Checkpoints and token windows from safetensors files.

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::store::{ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore};
use burn::tensor::{Device, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;

use super::llama::{Llama, LoneBlock, Sizes};

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

/// A checkpoint with the names of Hugging Face or of Meta, of which parts are loaded.
pub(crate) struct Checkpoint {
    path: PathBuf,
    pub(crate) sizes: Sizes,
    is_hugging_face: bool,
}

/// The whole model of a checkpoint.
pub(crate) fn load(
    path: &Path,
    heads: Option<usize>,
    positions: usize,
    device: &Device,
) -> Result<Llama, Box<dyn Error>> {
    let checkpoint = Checkpoint::open(path, heads, positions)?;
    let model = checkpoint.sizes.init(device);
    let model = checkpoint.filled(model, Vec::new())?;
    Ok(match checkpoint.is_hugging_face {
        true => model.map_rotated(in_pairs),
        false => model,
    })
}

impl Checkpoint {
    /// Reads the header of a file. The numbers of heads come from its metadata (`n_heads`,
    /// `n_kv_heads`) where it has them.
    pub(crate) fn open(
        path: &Path,
        heads: Option<usize>,
        positions: usize,
    ) -> Result<Self, Box<dyn Error>> {
        let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let metadata = header(path).map_err(|error| named(&error))?;
        let names = metadata.offset_keys();
        let find = |ends: [&str; 2]| -> Result<Vec<usize>, String> {
            let found = names
                .iter()
                .filter(|name| ends.iter().any(|end| name.ends_with(end)));
            let first = found.min().and_then(|name| metadata.info(name));
            let first = first.ok_or_else(|| named(&format!("no tensor ends in {}", ends[0])))?;
            Ok(first.shape.clone())
        };
        let rows = |ends: [&str; 2]| match find(ends)?[..] {
            [rows, _] => Ok(rows),
            _ => Err(named(&format!("{} is no matrix", ends[0]))),
        };
        let [vocabulary, width] = find(["tok_embeddings.weight", "embed_tokens.weight"])?[..]
        else {
            return Err(named(&"the embedding is no matrix").into());
        };
        let hidden = rows(["w1.weight", "gate_proj.weight"])?;
        let query = rows(["wq.weight", "q_proj.weight"])?;
        let key = rows(["wk.weight", "k_proj.weight"])?;
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
        let layers = names
            .iter()
            .filter(|name| name.ends_with("wq.weight") || name.ends_with("q_proj.weight"));
        Ok(Self {
            sizes: Sizes {
                vocabulary,
                width,
                hidden,
                layers: layers.count(),
                heads,
                kv_heads: key / (query / heads),
                positions: number("max_seq_len").unwrap_or(positions).max(positions),
                own_head: names
                    .iter()
                    .any(|name| matches!(name.as_str(), "output.weight" | "lm_head.weight")),
            },
            is_hugging_face: names.iter().any(|name| name.contains("self_attn")),
            path: path.into(),
        })
    }

    /// Block `number` by itself.
    pub(crate) fn block(
        &self,
        number: usize,
        device: &Device,
    ) -> Result<LoneBlock, Box<dyn Error>> {
        let here = (format!(r"^layers\.{number}\."), "block.".to_string());
        let block = self.filled(self.sizes.lone_block(device), vec![here])?;
        Ok(match self.is_hugging_face {
            true => block.map_rotated(in_pairs),
            false => block,
        })
    }

    /// What is before and after the blocks.
    pub(crate) fn ends(&self, device: &Device) -> Result<Llama, Box<dyn Error>> {
        self.filled(self.sizes.ends(device), Vec::new())
    }

    /// `module` with its parameters from the file, those alone being read; `more` are further names.
    fn filled<M: Module>(
        &self,
        mut module: M,
        more: Vec<(String, String)>,
    ) -> Result<M, Box<dyn Error>> {
        let named = |error: &dyn std::fmt::Display| format!("{}: {error}", self.path.display());
        let mut store = SafetensorsStore::from_file(&self.path)
            .with_from_adapter(PyTorchToBurnAdapter)
            .allow_partial(true);
        let names = NAMES.map(|(from, to)| (from.to_string(), to.to_string()));
        let after = r"\.post_attention_layernorm\.".to_string();
        let names = names.into_iter().chain([(after, ".ffn_norm.".to_string())]);
        for (from, to) in names.chain(more) {
            store = store.with_key_remapping(from, to);
        }
        let applied = module
            .load_from(&mut store)
            .map_err(|error| named(&error))?;
        match applied.missing.is_empty() {
            true => Ok(module),
            false => Err(named(&format!("it has no {:?}", applied.missing)).into()),
        }
    }
}

/// What a safetensors file says of its tensors.
fn header(path: &Path) -> Result<Metadata, Box<dyn Error>> {
    let mut file = File::open(path)?;
    let mut size = [0; 8];
    file.read_exact(&mut size)?;
    let size = u64::from_le_bytes(size);
    if size > file.metadata()?.len() {
        return Err("it is no safetensors file".into());
    }
    let mut bytes = size.to_le_bytes().to_vec();
    file.take(size).read_to_end(&mut bytes)?;
    // All but the data, whose length is not looked at.
    Ok(serde_json::from_slice(&bytes[8..])?)
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
