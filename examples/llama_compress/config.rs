//! `config.json` of a model of Hugging Face.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::super::llama::{ROPE_THETA, RopeScaling, Sizes};
use super::checkpoint_error::CheckpointError;
use super::shards::read_json;

/// Its name.
pub(crate) const CONFIG: &str = "config.json";

/// What transformers takes where nothing is said.
const NORM_EPSILON: f64 = 1e-6;

/// What the file says of a Llama.
#[derive(Debug, Deserialize)]
pub(crate) struct Config {
    #[serde(skip)]
    file: PathBuf,
    model_type: Option<String>,
    architectures: Option<Vec<String>>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    num_hidden_layers: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    vocab_size: Option<usize>,
    head_dim: Option<usize>,
    /// Positions of the longest sequence; with scaled rotations those of the scaled ones.
    pub(crate) max_position_embeddings: Option<usize>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    rms_norm_eps: Option<f64>,
    tie_word_embeddings: Option<bool>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Rope>,
    /// Base and scaling of the rotations, since transformers 5.
    rope_parameters: Option<Rope>,
    quantization_config: Option<Quantization>,
}

/// How weights are codes, of which the name is enough here.
#[derive(Debug, Deserialize)]
struct Quantization {
    quant_method: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Rope {
    rope_type: Option<String>,
    /// Its older name.
    #[serde(rename = "type")]
    kind: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
}

impl Config {
    /// # Errors
    ///
    /// A file that cannot be read, and a model that the network is not.
    pub(crate) fn load(folder: &Path) -> Result<Self, CheckpointError> {
        let file = folder.join(CONFIG);
        let mut config: Self = read_json(&file)?;
        config.file = file;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), CheckpointError> {
        let taken = "it is a Llama";
        if self.model_type.is_none() && self.architectures.is_none() {
            return Err(self.unsupported("model_type", "not there", taken));
        }
        if let Some(kind) = self.model_type.as_ref().filter(|kind| *kind != "llama") {
            return Err(self.unsupported("model_type", kind, taken));
        }
        let mut architectures = self.architectures.iter().flatten();
        if let Some(other) =
            architectures.find(|name| !name.eq_ignore_ascii_case("LlamaForCausalLM"))
        {
            let taken = "it is LlamaForCausalLM";
            return Err(self.unsupported("architectures", other, taken));
        }
        if let Some(quantization) = &self.quantization_config {
            let method = quantization.quant_method.as_deref().unwrap_or("there");
            let taken = "it starts from floats, so take the checkpoint that this one was made from";
            return Err(self.unsupported("quantization_config", method, taken));
        }
        if let Some(other) = self.hidden_act.as_ref().filter(|name| *name != "silu") {
            let taken = "its activation is silu";
            return Err(self.unsupported("hidden_act", other, taken));
        }
        for (key, said) in [
            ("attention_bias", self.attention_bias),
            ("mlp_bias", self.mlp_bias),
        ] {
            if said == Some(true) {
                return Err(self.unsupported(key, "true", "its layers have no biases"));
            }
        }
        for (key, said) in [
            ("rope_theta", Some(self.rope_theta())),
            ("rms_norm_eps", self.rms_norm_eps),
        ] {
            let fits = |number: f32| number > 0.0 && number.is_finite();
            if let Some(number) = said.filter(|number| !fits(*number as f32)) {
                return Err(self.unsupported(key, number, "it takes a positive number"));
            }
        }
        self.rope_scaling().map(drop)
    }

    fn unsupported(
        &self,
        key: &'static str,
        said: impl fmt::Display,
        taken: &'static str,
    ) -> CheckpointError {
        CheckpointError::Unsupported {
            file: self.file.clone(),
            key,
            said: said.to_string(),
            taken,
        }
    }

    fn contradiction(
        &self,
        key: &'static str,
        said: impl fmt::Display,
        other: String,
    ) -> CheckpointError {
        CheckpointError::Contradiction {
            file: self.file.clone(),
            key,
            said: said.to_string(),
            other,
        }
    }

    /// Heads of queries, by the file and by `--heads`.
    pub(crate) fn heads(&self, asked: Option<usize>) -> Result<Option<usize>, CheckpointError> {
        self.agreed(
            "num_attention_heads",
            self.num_attention_heads,
            "--heads",
            asked,
        )
    }

    /// Refuses options that contradict the file.
    pub(crate) fn check_options(
        &self,
        rope_theta: Option<f64>,
        norm_epsilon: Option<f64>,
    ) -> Result<(), CheckpointError> {
        let said = self.said_rope_theta();
        self.agreed("rope_theta", said, "--rope-theta", rope_theta)?;
        let said = self.rms_norm_eps;
        self.agreed("rms_norm_eps", said, "--norm-eps", norm_epsilon)?;
        Ok(())
    }

    fn agreed<T: Copy + PartialEq + fmt::Display>(
        &self,
        key: &'static str,
        said: Option<T>,
        option: &str,
        asked: Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        match (said, asked) {
            (Some(said), Some(asked)) if said != asked => {
                let other = format!("{option} is {asked}: leave the option out, or correct it");
                Err(self.contradiction(key, said, other))
            }
            _ => Ok(asked.or(said)),
        }
    }

    fn said_rope_theta(&self) -> Option<f64> {
        let parameters = self.rope_parameters.as_ref();
        self.rope_theta
            .or_else(|| parameters.and_then(|rope| rope.rope_theta))
    }

    /// Base of the rotations.
    pub(crate) fn rope_theta(&self) -> f64 {
        self.said_rope_theta().unwrap_or(f64::from(ROPE_THETA))
    }

    /// What keeps norms from dividing by 0.
    pub(crate) fn norm_epsilon(&self) -> f64 {
        self.rms_norm_eps.unwrap_or(NORM_EPSILON)
    }

    /// Scaling of the rotations: none, or that of Llama 3.1.
    pub(crate) fn rope_scaling(&self) -> Result<Option<RopeScaling>, CheckpointError> {
        let (key, rope) = match (&self.rope_scaling, &self.rope_parameters) {
            (None, None) => return Ok(None),
            (Some(rope), None) => ("rope_scaling", rope),
            (None, Some(rope)) => ("rope_parameters", rope),
            (Some(_), Some(_)) => {
                let taken = "it takes one of the two";
                return Err(self.unsupported("rope_scaling", "beside `rope_parameters`", taken));
            }
        };
        match rope.rope_type.as_ref().or(rope.kind.as_ref()) {
            Some(kind) if kind == "llama3" => {}
            Some(kind) if kind == "default" => return Ok(None),
            None if key == "rope_parameters" => return Ok(None),
            kind => {
                let said = format!("of the type {}", kind.map_or("none", String::as_str));
                return Err(self.unsupported(key, said, "it takes null and the type llama3"));
            }
        }
        let scaling = || {
            let scaling = RopeScaling {
                factor: rope.factor?,
                low: rope.low_freq_factor?,
                high: rope.high_freq_factor?,
                positions: rope.original_max_position_embeddings?,
            };
            let RopeScaling {
                factor,
                low,
                high,
                positions,
            } = scaling;
            let numbers = [factor, low, high, positions];
            let fits = numbers.iter().all(|x| x.is_finite() && *x > 0.0) && low < high;
            fits.then_some(scaling)
        };
        let taken = "it takes positive `factor`, `low_freq_factor`, `high_freq_factor` above it and \
                     `original_max_position_embeddings`";
        match scaling() {
            Some(scaling) => Ok(Some(scaling)),
            None => Err(self.unsupported(key, "of the type llama3 with other numbers", taken)),
        }
    }

    /// Whether the head is a matrix of its own.
    pub(crate) fn own_head(&self, has_head: bool) -> Result<bool, CheckpointError> {
        match self.tie_word_embeddings {
            Some(false) if !has_head => {
                let other = "there is no `lm_head.weight`: set it to true, or add the tensor";
                Err(self.contradiction("tie_word_embeddings", false, other.into()))
            }
            Some(tied) => Ok(!tied),
            None => Ok(has_head),
        }
    }

    /// Refuses weights of other sizes than the file says.
    pub(crate) fn check_sizes(&self, sizes: &Sizes) -> Result<(), CheckpointError> {
        let kv_heads = self.num_key_value_heads.or(self.num_attention_heads);
        for (key, said, found) in [
            ("head_dim", self.head_dim, sizes.width / sizes.heads),
            ("num_key_value_heads", kv_heads, sizes.kv_heads),
            ("num_hidden_layers", self.num_hidden_layers, sizes.layers),
            ("hidden_size", self.hidden_size, sizes.width),
            ("intermediate_size", self.intermediate_size, sizes.hidden),
            ("vocab_size", self.vocab_size, sizes.vocabulary),
        ] {
            if let Some(said) = said.filter(|said| *said != found) {
                let other = format!("the weights have {found}: the two are of different models");
                return Err(self.contradiction(key, said, other));
            }
        }
        Ok(())
    }
}
