//! What can be asked for on the command line.

use std::path::PathBuf;

use burn_lean::oneshot::{Pattern, Preset, Prune, PruneMethod, Quantize, Rounding, Scaling};
use burn_lean::quant::KvFormat;
use clap::{Parser, ValueEnum};

use super::support::{self, DeviceName};

#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
#[command(about = "Compresses a language model in one pass over calibration text")]
pub(crate) struct Cli {
    /// A Llama checkpoint: a folder as it comes from Hugging Face (config.json, model.safetensors or its
    /// shards), or a safetensors file, with the config.json beside it if there is one; without it a tiny character
    /// model is trained.
    #[arg(long, value_name = "PATH", requires = "tokens")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Windows of tokens `calibration` and `eval` (safetensors, I32).
    #[arg(long, value_name = "FILE", requires = "checkpoint")]
    pub(crate) tokens: Option<PathBuf>,
    /// Also compresses the head of a checkpoint where it is a matrix of its own, which otherwise stays as it is:
    /// older versions of vLLM and SGLang do not read codes of a head.
    #[arg(long, requires = "checkpoint", conflicts_with = "stream")]
    pub(crate) head: bool,
    /// Attention heads [default: as config.json or the metadata of the checkpoint say].
    #[arg(long, requires = "checkpoint", value_parser = support::at_least_one)]
    pub(crate) heads: Option<usize>,
    /// Base of the rotary positions of the checkpoint [default: as config.json says, or 10000].
    #[arg(long, requires = "checkpoint", value_parser = support::positive)]
    pub(crate) rope_theta: Option<f64>,
    /// Epsilon of the norms of the checkpoint [default: as config.json says, or 1e-6; of a file 1e-5].
    #[arg(long, requires = "checkpoint", value_parser = support::positive)]
    pub(crate) norm_eps: Option<f64>,
    /// One or more methods [default: gptq, or best-subset with --sparsity].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) method: Vec<Method>,
    /// A preset instead of a method: sparse-S; wBa16 or wBa8, with -gN, -sym or -asym; or both. For instance
    /// sparse-2:4, w4a8-g32, sparse-2:4-w4a16-g32.
    #[arg(
        long,
        conflicts_with_all = ["method", "bits", "group", "asymmetric", "sparsity", "as_published"]
    )]
    pub(crate) preset: Option<Preset>,
    /// Bits of a weight, 2 to 8 [default: 4 for the methods that quantize].
    #[arg(long)]
    pub(crate) bits: Option<u8>,
    /// Inputs that share a scale [default: all].
    #[arg(long)]
    pub(crate) group: Option<usize>,
    /// A zero point for each scale.
    #[arg(long)]
    pub(crate) asymmetric: bool,
    /// A fraction of zeros (0.5), or kept:of (2:4) [default: 0.5 for the methods that prune]. Methods that
    /// only quantize take best subsets, rtn and --as-published the zeros of SparseGPT.
    #[arg(long)]
    pub(crate) sparsity: Option<Pattern>,
    /// How values become codes [default: as the method has it].
    #[arg(long, value_enum, conflicts_with_all = ["preset", "as_published"])]
    pub(crate) rounding: Option<Codes>,
    /// The method as it was published, without what this project adds.
    #[arg(long)]
    pub(crate) as_published: bool,
    /// With --as-published: GPTQ in the order of activations, with ranges fixed beforehand.
    #[arg(long, requires = "as_published")]
    pub(crate) activation_order: bool,
    /// Windows of calibration text, at most [default: all].
    #[arg(long, value_parser = support::at_least_one)]
    pub(crate) windows: Option<usize>,
    /// Windows in a batch; of calibration text and in an engine fewer where so many do not divide their number.
    #[arg(long, default_value_t = 8, value_parser = support::at_least_one)]
    pub(crate) batch: usize,
    /// Steps in which the model without checkpoint is trained.
    #[arg(long, default_value_t = 300, conflicts_with = "checkpoint")]
    pub(crate) steps: usize,
    /// Tokens to generate before and after, at most 100,000; 0 for none.
    #[arg(long, default_value_t = 64, value_parser = tokens)]
    pub(crate) generate: usize,
    /// Keys and values of the attention: as floats, or in 8 bits; in generation and evaluation.
    #[arg(long, value_enum, default_value_t = Kv::Float)]
    pub(crate) kv: Kv,
    /// Steps in which what is left of a pruned model learns to do as the original model, 150 for
    /// instance: a second row. Zeros are held; the loss is the divergence of the original model's
    /// logits on 4 windows of calibration text a step; AdamW at 2e-3 or less, seeded by --seed.
    #[arg(long, value_name = "STEPS", value_parser = support::at_least_one)]
    pub(crate) finetune: Option<usize>,
    /// Has one block in memory at a time, and writes each to a file here, and what is around them to
    /// `ends.safetensors` (one method only).
    #[arg(long, value_name = "FOLDER", requires = "checkpoint", conflicts_with_all = ["out", "kv", "finetune"])]
    pub(crate) stream: Option<PathBuf>,
    /// Also compiles each compressed model for the inference engine, and measures it there.
    #[arg(long, conflicts_with_all = ["stream", "kv"])]
    pub(crate) engine: bool,
    /// Writes the compressed model, after fine-tuning where that is asked for (one method only).
    #[arg(long, value_name = "FILE", value_parser = support::output_file)]
    pub(crate) out: Option<PathBuf>,
    /// Writes a folder that Transformers loads: `config.json`, weights in the layout of compressed-tensors, and the
    /// tokenizer that lies beside the checkpoint (one method only). vLLM loads it where it has kernels for the grid
    /// (w4a16-g32 to -g128, w8a16, w8a8, not w4a8-g32). What else it takes, and which layers stay floats because
    /// groups do not divide their inputs, is said before the run.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) pretrained: Option<PathBuf>,
    /// Keeps finished blocks here, and goes on after the last one; what a killed run left of --pretrained is
    /// written anew (one method only).
    #[arg(long, value_name = "FOLDER")]
    pub(crate) state: Option<PathBuf>,
    /// Keeps activations in files here.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) spill: Option<PathBuf>,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    pub(crate) device: DeviceName,
    /// Seed of the model that is trained.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// Writes a row for each method.
    #[arg(long, value_name = "FILE", value_parser = support::output_file)]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Method {
    Rtn,
    Gptq,
    Awq,
    #[value(name = "smoothquant")]
    SmoothQuant,
    Magnitude,
    Wanda,
    #[value(name = "sparsegpt")]
    SparseGpt,
    BestSubset,
}

/// How values become codes.
#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Codes {
    /// Each to its nearest.
    Nearest,
    /// Input by input, the others make good.
    Gptq,
    /// And then again, with better scales.
    Refined,
    /// And zeros move, too.
    Joint,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Kv {
    Float,
    Int8,
}

impl From<Kv> for KvFormat {
    fn from(kv: Kv) -> Self {
        match kv {
            Kv::Float => Self::Float,
            Kv::Int8 => Self::Int8,
        }
    }
}

impl Method {
    fn name(self) -> String {
        support::option_name(&self)
    }

    /// Whether codes are compensated for by the inputs that follow, in an order.
    fn compensates(self) -> bool {
        !matches!(self, Self::Rtn | Self::Awq | Self::SmoothQuant)
    }

    fn prunes(self) -> Option<PruneMethod> {
        match self {
            Self::Magnitude => Some(PruneMethod::Magnitude),
            Self::Wanda => Some(PruneMethod::Wanda),
            Self::SparseGpt => Some(PruneMethod::SparseGpt),
            Self::BestSubset => Some(PruneMethod::BestSubset),
            _ => None,
        }
    }
}

impl Cli {
    /// What is done, each with a name.
    ///
    /// # Errors
    ///
    /// An option that none of the methods has a use for.
    pub(crate) fn presets(&self) -> Result<Vec<(String, Preset)>, String> {
        if let Some(preset) = &self.preset {
            return Ok(vec![(preset.name(), preset.clone())]);
        }
        let methods = match (&self.method[..], self.sparsity) {
            ([], None) => vec![Method::Gptq],
            ([], Some(_)) => vec![Method::BestSubset],
            (methods, _) => methods.to_vec(),
        };
        let quantizes = |method: &Method| self.quantizes(*method);
        let of_codes = [
            ("--group", self.group.is_some()),
            ("--asymmetric", self.asymmetric),
            ("--rounding", self.rounding.is_some()),
        ];
        let given = of_codes.iter().find(|(_, given)| *given);
        if let (Some((option, _)), false) = (given, methods.iter().any(quantizes)) {
            return Err(format!(
                "{option} is about codes, but no method here makes any: give --bits, or leave it out"
            ));
        }
        let orders = |method: &Method| self.quantizes(*method) && method.compensates();
        if self.activation_order && !methods.iter().any(orders) {
            let expected = "gptq, or a method that prunes with --bits";
            return Err(format!("--activation-order is for {expected}"));
        }
        let presets = methods
            .iter()
            .map(|method| (method.name(), self.of_method(*method)));
        Ok(presets.collect())
    }

    fn quantizes(&self, method: Method) -> bool {
        method.prunes().is_none() || self.bits.is_some()
    }

    fn of_method(&self, method: Method) -> Preset {
        let mut preset = Preset::new();
        let prunes = method.prunes();
        if self.quantizes(method) {
            let rounding = match method.compensates() {
                false => Rounding::Nearest,
                true => match self.as_published {
                    true => Rounding::Compensated {
                        activation_order: self.activation_order,
                        sweeps: 0,
                    },
                    false => Rounding::refined(),
                },
            };
            // Plain rounding is what others are compared with: ranges as they are.
            let searched = !matches!(method, Method::Rtn | Method::SmoothQuant);
            let quantize = Quantize::new(self.bits.unwrap_or(4))
                .with_group(self.group)
                .with_symmetric(!self.asymmetric)
                .with_search_range(searched)
                .with_rounding(rounding);
            preset.quantize = Some(quantize);
        }
        if prunes.is_some() || self.sparsity.is_some() {
            let pattern = self.sparsity.unwrap_or(Pattern::PerLayer(0.5));
            let pattern = match (method, pattern) {
                // As in its paper.
                (Method::Wanda, Pattern::PerLayer(fraction)) => Pattern::PerOutput(fraction),
                (_, pattern) => pattern,
            };
            // A method that only quantizes says nothing of zeros: those of the default, or published ones.
            let others = match self.as_published || method == Method::Rtn {
                true => PruneMethod::SparseGpt,
                false => PruneMethod::BestSubset,
            };
            preset.prune = Some(Prune::new(pattern, prunes.unwrap_or(others)));
        }
        preset.scaling = match method {
            Method::Awq => Some(Scaling::Awq),
            Method::SmoothQuant => Some(Scaling::SmoothQuant { alpha: 0.5 }),
            _ => None,
        };
        let plain = matches!(method, Method::Rtn | Method::Magnitude | Method::Wanda);
        let published = self.as_published || plain || method == Method::SparseGpt;
        if published {
            preset = preset.as_published();
        }
        if let (Some(codes), Some(quantize)) = (self.rounding, &mut preset.quantize) {
            quantize.exchange_zeros = codes == Codes::Joint;
            quantize.rounding = match codes {
                Codes::Nearest => Rounding::Nearest,
                Codes::Gptq => Rounding::Compensated {
                    activation_order: true,
                    sweeps: 0,
                },
                Codes::Refined | Codes::Joint => Rounding::refined(),
            };
        }
        preset
    }
}

/// A count of tokens whose positions a table can hold.
fn tokens(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if count <= 100_000 => Ok(count),
        _ => Err("must be a whole number of at most 100,000".into()),
    }
}
