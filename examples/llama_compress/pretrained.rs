//! A folder that Transformers loads, and vLLM where it has kernels for the grid.

use std::error::Error;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn_lean::quant::deploy::PretrainedFolder;
use serde_json::{Map, Value, json};

use super::checkpoint::{Checkpoint, ENDS, PARTS, layer_of};
use super::llama::Sizes;

/// What is beside the weights of a checkpoint and belongs to the tokenizer and to generation.
const BESIDE: [&str; 7] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
];

/// Positions of a model of which nothing says them: what Transformers takes.
const POSITIONS: usize = 2048;

/// A model on its way into a folder.
pub(crate) struct Pretrained {
    folder: PretrainedFolder,
    to: PathBuf,
    /// What is known of the network.
    config: Map<String, Value>,
}

impl Pretrained {
    /// Makes the folder, and reads what lies beside the weights of `checkpoint` now, hours before the last of them
    /// is written: the configuration, in whose place there is one of `sizes` where there is none, and the files of
    /// the tokenizer, which are copied. With `goes_on`, what a killed run left in the folder is removed: all of it
    /// is written again.
    ///
    /// # Errors
    ///
    /// A folder that cannot be made, or holds a model; a configuration or a tokenizer that cannot be read.
    pub(crate) fn create(
        to: &Path,
        goes_on: bool,
        sizes: &Sizes,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Self, Box<dyn Error>> {
        let from = checkpoint.and_then(|one| one.folder.as_deref());
        let config = match checkpoint {
            Some(checkpoint) => config_of(checkpoint, sizes)?,
            None => config(sizes, sizes.positions),
        };
        if goes_on && to.join(UNFINISHED).exists() {
            remove_weights(to)?;
        }
        let folder = PretrainedFolder::create(to)?;
        std::fs::write(to.join(UNFINISHED), b"")?;
        for name in BESIDE {
            let copied = from.map(|from| from.join(name));
            if let Some(file) = copied.filter(|file| file.is_file()) {
                // No copy of the permissions: the next run may have to write it once more.
                std::fs::read(&file)
                    .and_then(|bytes| std::fs::write(to.join(name), bytes))
                    .map_err(|error| format!("{}: {error}", file.display()))?;
            }
        }
        Ok(Self {
            folder,
            to: to.into(),
            config,
        })
    }

    /// Adds the whole model, or block `block` by itself.
    pub(crate) fn add<M: Module>(
        &mut self,
        model: &M,
        block: Option<usize>,
    ) -> Result<(), Box<dyn Error>> {
        Ok(self.folder.add(model, |path| name(path, block))?)
    }

    /// Writes the configuration, with which the folder is complete.
    pub(crate) fn finish(&mut self) -> Result<(), Box<dyn Error>> {
        let report = self.folder.finish(&self.config)?;
        std::fs::remove_file(self.to.join(UNFINISHED))?;
        println!(
            "{}: {} bytes of weights, {}, {} matrices in codes",
            self.to.display(),
            report.bytes,
            report.format,
            report.quantized.len()
        );
        for (path, reason) in report.left_out {
            println!("{path}: {reason}");
        }
        Ok(())
    }
}

/// What lies in a folder that had no weights before this program began to write some, until all are there.
const UNFINISHED: &str = "unfinished";

/// Removes the weights of a folder that was not finished, under whatever name.
fn remove_weights(folder: &Path) -> Result<(), Box<dyn Error>> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let is_weights =
            name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
        if is_weights || name == "config.json" {
            std::fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    }
    Ok(())
}

/// The name of a tensor in Transformers' network, from its path in the model or in a block by itself.
fn name(path: &str, block: Option<usize>) -> String {
    let renamed = |path: &str, names: &[(&str, &str)]| {
        let mut names = names.iter();
        let name = names.find_map(|(ours, theirs)| {
            let rest = path.strip_prefix(ours)?;
            rest.starts_with('.').then(|| format!("{theirs}{rest}"))
        });
        name.unwrap_or_else(|| path.to_string())
    };
    let part = match block {
        Some(number) => path
            .strip_prefix("block.")
            .map(|part| (number.to_string(), part)),
        None => layer_of(path).map(|(number, part)| (number.to_string(), part)),
    };
    match part {
        Some((number, part)) => format!("model.layers.{number}.{}", renamed(part, &PARTS)),
        None => renamed(path, &ENDS),
    }
}

/// The configuration of a checkpoint, with what it does not say and was read with.
fn config_of(checkpoint: &Checkpoint, sizes: &Sizes) -> Result<Map<String, Value>, Box<dyn Error>> {
    let Some(folder) = &checkpoint.folder else {
        let positions = checkpoint.limit.unwrap_or_else(|| {
            let positions = POSITIONS.max(sizes.positions);
            println!(
                "nothing says for how many positions the model is: `max_position_embeddings` will be {positions}"
            );
            positions
        });
        return Ok(config(sizes, positions));
    };
    let file = folder.join("config.json");
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = std::fs::read(&file).map_err(|error| named(&error))?;
    let mut found: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|error| named(&error))?;
    for key in ["torch_dtype", "dtype"] {
        found.remove(key);
    }
    let has_scaling = found.contains_key("rope_parameters");
    let mut said = config(sizes, sizes.positions);
    // As they are computed with here, whatever they were.
    let keys = ["dtype", "rms_norm_eps", "rope_theta", "tie_word_embeddings"];
    for key in keys {
        let is_said = found.contains_key(key) || key == "rope_theta" && has_scaling;
        if let Some(value) = said.remove(key).filter(|_| !is_said) {
            found.insert(key.into(), value);
        }
    }
    Ok(found)
}

/// What says of a network of these sizes all that its readers need.
fn config(sizes: &Sizes, positions: usize) -> Map<String, Value> {
    let scaling = sizes.rope_scaling.map(|scaling| {
        json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.positions,
        })
    });
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": sizes.width,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.width / sizes.heads,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": sizes.norm_epsilon,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": !sizes.own_head,
        "dtype": "float32",
    });
    match config {
        Value::Object(config) => config,
        _ => Map::new(),
    }
}
