//! A folder that Transformers and vLLM load.

use std::error::Error;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn_lean::quant::deploy::PretrainedFolder;
use serde_json::{Map, Value, json};

use super::checkpoint::{ENDS, PARTS, layer_of};
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

/// A model on its way into a folder.
pub(crate) struct Pretrained {
    folder: PretrainedFolder,
    to: PathBuf,
}

impl Pretrained {
    /// With `goes_on`, what a killed run left in the folder is removed: all of it is written again.
    ///
    /// # Errors
    ///
    /// A folder that cannot be made, or holds a model.
    pub(crate) fn create(to: &Path, goes_on: bool) -> Result<Self, Box<dyn Error>> {
        if goes_on && to.join(UNFINISHED).exists() {
            remove_weights(to)?;
        }
        let folder = PretrainedFolder::create(to)?;
        std::fs::write(to.join(UNFINISHED), b"")?;
        Ok(Self {
            folder,
            to: to.into(),
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

    /// Writes the configuration: that of the folder `from` where it has one, or what says as much. Files of
    /// the tokenizer there are copied.
    pub(crate) fn finish(
        &mut self,
        from: Option<&Path>,
        sizes: &Sizes,
    ) -> Result<(), Box<dyn Error>> {
        let from = from.filter(|path| path.is_dir());
        let mut config = match from {
            Some(folder) => {
                let text = std::fs::read_to_string(folder.join("config.json"))?;
                serde_json::from_str(&text)?
            }
            None => config(sizes),
        };
        // As they are computed with here.
        for key in ["torch_dtype", "dtype"] {
            config.remove(key);
        }
        config.insert("dtype".into(), "float32".into());
        // What the folder does not say, and what it was read with.
        let said = self::config(sizes);
        let has_scaling = config.contains_key("rope_parameters");
        for key in ["rms_norm_eps", "rope_theta", "tie_word_embeddings"] {
            let is_said = config.contains_key(key) || key == "rope_theta" && has_scaling;
            if !is_said {
                config.extend(
                    said.get_key_value(key)
                        .map(|(key, value)| (key.clone(), value.clone())),
                );
            }
        }
        if let Some(folder) = from {
            for name in BESIDE.iter().filter(|name| folder.join(name).is_file()) {
                std::fs::copy(folder.join(name), self.to.join(name))
                    .map_err(|error| format!("{}: {error}", folder.join(name).display()))?;
            }
        }
        let report = self.folder.finish(config)?;
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

fn config(sizes: &Sizes) -> Map<String, Value> {
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
        "max_position_embeddings": sizes.positions,
        "rms_norm_eps": sizes.norm_epsilon,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": !sizes.own_head,
    });
    match config {
        Value::Object(config) => config,
        _ => Map::new(),
    }
}
