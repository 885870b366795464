//! Checkpoints and token windows from safetensors files.

mod checkpoint_error;
mod config;
mod shards;

use std::error::Error;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::store::{
    FloatCastAdapter, ModuleAdapter, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore,
};
use burn::tensor::{DType, Device, Tensor};
use safetensors::SafeTensors;

use super::llama::{Llama, LoneBlock, NORM_EPSILON, ROPE_THETA, Sizes};
pub(crate) use checkpoint_error::CheckpointError;
use config::{CONFIG, Config};
use shards::Shards;

/// The parts of a block by Meta's names, which are those of the module here, and by Hugging Face's.
pub(crate) const PARTS: [(&str, &str); 9] = [
    ("attention_norm", "input_layernorm"),
    ("attention.wq", "self_attn.q_proj"),
    ("attention.wk", "self_attn.k_proj"),
    ("attention.wv", "self_attn.v_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
];

/// What is before and after the blocks, likewise.
pub(crate) const ENDS: [(&str, &str); 3] = [
    ("tok_embeddings", "model.embed_tokens"),
    ("norm", "model.norm"),
    ("output", "lm_head"),
];

/// What some files keep of the rotations; it is computed here.
const ROTATIONS: [&str; 4] = [
    "rotary_emb.inv_freq",
    "rope.freqs",
    "freqs_cos",
    "freqs_sin",
];

/// A checkpoint with the names of Hugging Face or of Meta, of which parts are loaded.
pub(crate) struct Checkpoint {
    path: PathBuf,
    /// Where its configuration is, if it has one.
    pub(crate) folder: Option<PathBuf>,
    shards: Shards,
    config: Option<Config>,
    /// Positions of the longest sequence that the model is for, if anything says so.
    pub(crate) limit: Option<usize>,
    pub(crate) sizes: Sizes,
    is_hugging_face: bool,
}

impl Checkpoint {
    /// Reads the headers of a file, or of the files of a folder, and `config.json` there or beside the file.
    /// The number of heads is `heads`, or what the configuration or `n_heads` of the metadata say.
    ///
    /// # Errors
    ///
    /// What cannot be read, another network, and sequences of `positions` that are longer than those of the model:
    /// it computes them, but knows nothing of them.
    pub(crate) fn open(
        path: &Path,
        heads: Option<usize>,
        positions: usize,
    ) -> Result<Self, Box<dyn Error>> {
        let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let (shards, folder) = match path.is_dir() {
            true => (Shards::in_folder(path)?, Some(path)),
            // What lies beside a file says of it what the file does not.
            false => (
                Shards::of_files([path.to_path_buf()])?,
                path.parent().filter(|folder| folder.join(CONFIG).is_file()),
            ),
        };
        let config = folder.map(Config::load).transpose()?;
        let (says, key, limit) = match (folder, &config) {
            (Some(folder), Some(config)) if config.max_position_embeddings.is_some() => (
                folder.join(CONFIG),
                "max_position_embeddings",
                config.max_position_embeddings,
            ),
            _ => (path.into(), "max_seq_len", shards.number("max_seq_len")),
        };
        if let Some(limit) = limit.filter(|limit| *limit < positions) {
            return Err(CheckpointError::Contradiction {
                file: says,
                key,
                said: limit.to_string(),
                other: format!(
                    "windows or generated text take {positions} positions: cut them to what the model is for"
                ),
            }
            .into());
        }
        if let Some(other) = shards.names().find(|name| !is_taken(name)) {
            return Err(named(&format!(
                "the network has no place for `{other}`: it is a Llama without biases and without \
                 norms of queries and keys"
            ))
            .into());
        }
        let matrix = |ends: [&str; 2]| match shards.shape(ends) {
            Some(&[rows, columns]) => Ok([rows, columns]),
            Some(_) => Err(named(&format!("{} is no matrix", ends[0]))),
            None => Err(named(&format!("no tensor ends in {}", ends[0]))),
        };
        let [vocabulary, width] = matrix(["tok_embeddings.weight", "embed_tokens.weight"])?;
        let [hidden, _] = matrix(["w1.weight", "gate_proj.weight"])?;
        let [query, _] = matrix(["wq.weight", "q_proj.weight"])?;
        let [key, _] = matrix(["wk.weight", "k_proj.weight"])?;
        let heads = match &config {
            Some(config) => config.heads(heads)?,
            None => heads,
        };
        let heads = heads.or_else(|| shards.number("n_heads"));
        let heads = heads.ok_or_else(|| {
            named(&"nothing in it says how many attention heads there are: give --heads")
        })?;
        let head = query.checked_div(heads).unwrap_or(0);
        let kv_heads = key.checked_div(head).unwrap_or(0);
        let divides = |part: usize, whole: usize| part > 0 && whole.is_multiple_of(part);
        let fits = divides(heads, query) && divides(head, key) && divides(kv_heads, heads);
        if !fits || query != width || !head.is_multiple_of(2) {
            return Err(named(&format!(
                "{heads} heads do not fit {query} features of queries and {key} of keys in a width of \
                 {width}: they divide it into even sizes"
            ))
            .into());
        }
        let is_query = |name: &&str| name.ends_with("wq.weight") || name.ends_with("q_proj.weight");
        let is_head = |name: &str| matches!(name, "output.weight" | "lm_head.weight");
        let has_head = shards.names().any(is_head);
        let is_hugging_face = shards.names().any(|name| name.contains("self_attn"));
        let mut sizes = Sizes {
            vocabulary,
            width,
            hidden,
            layers: shards.names().filter(is_query).count(),
            heads,
            kv_heads,
            positions: shards
                .number("max_seq_len")
                .unwrap_or(positions)
                .max(positions),
            own_head: has_head,
            rope_theta: ROPE_THETA,
            rope_scaling: None,
            norm_epsilon: NORM_EPSILON,
        };
        if let Some(config) = &config {
            config.check_sizes(&sizes)?;
            sizes.own_head = config.own_head(has_head)?;
            sizes.rope_theta = config.rope_theta() as f32;
            sizes.rope_scaling = config.rope_scaling()?;
            sizes.norm_epsilon = config.norm_epsilon();
        }
        Ok(Self {
            sizes,
            is_hugging_face,
            path: path.into(),
            folder: folder.map(Path::to_path_buf),
            shards,
            config,
            limit,
        })
    }

    /// With the base of the rotations and the epsilon of the norms that options say.
    pub(crate) fn with_options(
        mut self,
        rope_theta: Option<f64>,
        norm_epsilon: Option<f64>,
    ) -> Result<Self, CheckpointError> {
        if let Some(config) = &self.config {
            config.check_options(rope_theta, norm_epsilon)?;
        }
        if let Some(theta) = rope_theta {
            self.sizes.rope_theta = theta as f32;
        }
        if let Some(epsilon) = norm_epsilon {
            self.sizes.norm_epsilon = epsilon;
        }
        Ok(self)
    }

    /// The whole model.
    pub(crate) fn load(&self, device: &Device) -> Result<Llama, Box<dyn Error>> {
        let model = self.filled(self.sizes.init(device), Vec::new(), |_| true)?;
        Ok(match self.is_hugging_face {
            true => model,
            false => model.map_rotated(in_halves),
        })
    }

    /// Block `number` by itself.
    pub(crate) fn block(
        &self,
        number: usize,
        device: &Device,
    ) -> Result<LoneBlock, Box<dyn Error>> {
        let here = (format!(r"^layers\.{number}\."), "block.".to_string());
        let is_here = |name: &str| layer_of(name).is_some_and(|(of, _)| of == number.to_string());
        let block = self.filled(self.sizes.lone_block(device), vec![here], is_here)?;
        Ok(match self.is_hugging_face {
            true => block,
            false => block.map_rotated(in_halves),
        })
    }

    /// What is before and after the blocks.
    pub(crate) fn ends(&self, device: &Device) -> Result<Llama, Box<dyn Error>> {
        let is_end = |name: &str| layer_of(name).is_none();
        self.filled(self.sizes.ends(device), Vec::new(), is_end)
    }

    /// `module` with its parameters, those alone being read and from the files alone that have them, in
    /// F32 whatever they are there; `more` are further names, `is_wanted` says which tensors they are.
    fn filled<M: Module>(
        &self,
        mut module: M,
        more: Vec<(String, String)>,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<M, Box<dyn Error>> {
        let escaped = |name: &str| name.replace('.', r"\.");
        let ends = ENDS.map(|(to, from)| (format!(r"^{}\.", escaped(from)), format!("{to}.")));
        let blocks = (r"^model\.layers\.".to_string(), "layers.".to_string());
        let parts = PARTS.map(|(to, from)| (format!(r"\.{}\.", escaped(from)), format!(".{to}.")));
        let names = ends.into_iter().chain([blocks]).chain(parts);
        let names: Vec<(String, String)> = names.chain(more).collect();
        // What no file so far has had.
        let mut missing: Option<Vec<String>> = None;
        for file in self.shards.files(is_wanted) {
            let mut store = SafetensorsStore::from_file(file)
                .with_from_adapter(PyTorchToBurnAdapter.chain(FloatCastAdapter::to(DType::F32)))
                .allow_partial(true);
            for (from, to) in &names {
                store = store.with_key_remapping(from, to.clone());
            }
            let applied = module
                .load_from(&mut store)
                .map_err(|error| format!("{}: {error}", file.display()))?;
            let lacks = |path: &String| applied.missing.iter().any(|(lacked, _)| lacked == path);
            missing = Some(match missing {
                Some(paths) => paths.into_iter().filter(lacks).collect(),
                None => applied
                    .missing
                    .iter()
                    .map(|(path, _)| path.clone())
                    .collect(),
            });
        }
        match missing {
            Some(missing) if missing.is_empty() => Ok(module),
            missing => Err(format!(
                "{}: it has no {:?}",
                self.path.display(),
                missing.unwrap_or_default()
            )
            .into()),
        }
    }
}

/// Whether a tensor of this name has a place in the network, or need not have one.
fn is_taken(name: &str) -> bool {
    let Some(name) = name.strip_suffix(".weight") else {
        return ROTATIONS.iter().any(|end| name.ends_with(end));
    };
    let is_of = |table: &[(&str, &str)], part: &str| {
        let mut names = table.iter();
        names.any(|(ours, theirs)| part == *ours || part == *theirs)
    };
    match layer_of(name) {
        Some((_, part)) => is_of(&PARTS, part),
        None => is_of(&ENDS, name),
    }
}

/// Number of the block that a tensor is of, and its name there.
pub(crate) fn layer_of(name: &str) -> Option<(&str, &str)> {
    let layer = name.strip_prefix("model.").unwrap_or(name);
    layer.strip_prefix("layers.")?.split_once('.')
}

/// From Meta's order of the features of a head, where neighbours are rotated, to that of Hugging Face, where
/// the first half is with the second.
fn in_halves(weight: Tensor<2>, heads: usize) -> Tensor<2> {
    let [inputs, outputs] = weight.dims();
    weight
        .reshape([inputs, heads, outputs / heads / 2, 2])
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

    /// The first so many of them, at most.
    pub(crate) fn first(mut self, count: usize) -> Self {
        self.tokens.truncate(count.saturating_mul(self.length));
        self
    }

    /// Refuses tokens that a vocabulary does not have.
    pub(crate) fn check(&self, name: &str, vocabulary: usize) -> Result<(), String> {
        let is_known =
            |token: &&i32| usize::try_from(**token).is_ok_and(|token| token < vocabulary);
        match self.tokens.iter().find(|token| !is_known(token)) {
            Some(token) => Err(format!(
                "`{name}` has the token {token}, but the {vocabulary} tokens of the checkpoint \
                 count from 0"
            )),
            None => Ok(()),
        }
    }

    /// Windows `[windows, length]` of I32 in a safetensors file: at least one, of two tokens or more.
    pub(crate) fn load(path: &Path, name: &str) -> Result<Self, Box<dyn Error>> {
        let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let bytes = std::fs::read(path).map_err(|error| named(&error))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| named(&error))?;
        let tensor = file.tensor(name).map_err(|error| named(&error))?;
        let (&[count, length], safetensors::Dtype::I32) = (tensor.shape(), tensor.dtype()) else {
            return Err(named(&format!("`{name}` is not [windows, tokens] of I32")).into());
        };
        if count == 0 || length < 2 {
            return Err(named(&format!(
                "`{name}` is [{count}, {length}]: there is no token to predict"
            ))
            .into());
        }
        let numbers = tensor.data().chunks_exact(4);
        Ok(Self {
            length,
            tokens: numbers
                .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        })
    }
}
