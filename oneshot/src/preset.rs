//! What is done to the weights of a model, as a value that can be printed, edited and stored.

use std::fmt;
use std::str::FromStr;

use burn::config::Config;
use serde::{Deserialize, Serialize};

use crate::OneShotError;
use crate::error::invalid;

/// What is done to the weights of a model.
///
/// ```
/// use burn_lean_oneshot::{Pattern, Preset, Rounding};
///
/// let mut preset: Preset = "w4a16-g32".parse().unwrap();
/// assert_eq!(preset, Preset::w4a16().with_group(32));
/// // Every choice can be changed, printed and stored.
/// preset.quantize.as_mut().unwrap().symmetric = true;
/// assert_eq!(preset.name(), "w4a16-g32-sym");
/// let stored = serde_json::to_string(&preset).unwrap();
/// assert_eq!(serde_json::from_str::<Preset>(&stored).unwrap(), preset);
/// // Zeros first, then the weights that stay on a grid; zeros move only with `exchange_zeros`.
/// let both: Preset = "sparse-2:4-w4a16-g32".parse().unwrap();
/// assert_eq!(both.prune.unwrap().pattern, Pattern::NOfM { n: 2, m: 4 });
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct Preset {
    /// Which weights become zero. Default: none.
    pub prune: Option<Prune>,
    /// The grid of the weights. Default: none, weights stay floats.
    pub quantize: Option<Quantize>,
    /// Factors between layers, written into the model before quantization; a layer without a place for
    /// them says so in the report ([`unscaled`](crate::LayerReport::unscaled)). Between two matrices there is one
    /// where both are of the same block ([`blocks`](Self::blocks)). With factors the target is
    /// [`Target::OwnInputs`], whatever [`target`](Self::target) says: a layer before them does not give
    /// what it gave. Default: none.
    pub scaling: Option<Scaling>,
    /// How the inputs of the compressed layers are rounded in use, which their sums take into account.
    /// Default: not at all.
    pub activations: Option<Activations>,
    /// Added to the diagonal of XᵀX, as a fraction of its mean; at least 0. Default 0.01.
    #[config(default = 0.01)]
    pub ridge: f64,
    /// What a compressed layer is to reproduce; with [`scaling`](Self::scaling) always
    /// [`Target::OwnInputs`]. Default: what the original model computes there.
    #[config(default = "Target::Original")]
    pub target: Target,
    /// What a layer's calibration inputs come from. Default: layer by layer.
    #[config(default = "Order::Layer")]
    pub order: Order,
    /// Paths under which weights stay as they are. Embeddings, and what is shared with them (a tied
    /// head), always do.
    #[config(default = "Vec::new()")]
    pub skip: Vec<String>,
    /// Paths of the blocks; of a group of parameters:
    /// [`with_blocks_of`](crate::OneShot::with_blocks_of). Default: found by the first number in a path
    /// (`layers.0`), and every weight without one by itself, which leaves no place for
    /// [factors](Self::scaling) between two of them; a block that is not called while others of
    /// its list are is an error ([`NeverCalled`](crate::OneShotError::NeverCalled)).
    pub blocks: Option<Vec<String>>,
}

/// Which weights become zero.
#[derive(Config, Debug, PartialEq)]
pub struct Prune {
    /// The fraction of zeros (0 to 1, without 1) of a matrix or of every output, or N:M.
    pub pattern: Pattern,
    /// Which weights go, and whether the others are fitted anew.
    pub method: PruneMethod,
}

/// How many weights of a matrix become zero, and in which shape.
///
/// A fraction f of n weights is ⌊f · n⌋ zeros, as in the published methods: for one half 3 of 7, for 0.1 none of 9.
/// (A `Budget` of burn-lean-prune is rounded the other way: at least that fraction of zeros.)
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Pattern {
    /// A fraction of every weight matrix, wherever they are.
    PerLayer(f64),
    /// A fraction of the weights of every output.
    PerOutput(f64),
    /// `n` of every `m` consecutive inputs are kept.
    NOfM {
        /// Kept of a group.
        n: usize,
        /// Inputs of a group.
        m: usize,
    },
}

/// How zeros are chosen.
#[derive(Config, Debug, PartialEq)]
#[non_exhaustive]
pub enum PruneMethod {
    /// The smallest weights; the others stay as they are.
    Magnitude,
    /// Weight times norm of the input
    /// ([Sun et al., 2023](https://arxiv.org/abs/2306.11695)); the others stay as they are.
    Wanda,
    /// One pass over the inputs, others make good
    /// ([Frantar & Alistarh, 2023](https://arxiv.org/abs/2301.00774)).
    SparseGpt,
    /// The best subset that a local search finds, with exact values; of large layers, of some thousand
    /// inputs, by splitting ([ALPS](https://arxiv.org/abs/2406.07831)).
    BestSubset,
}

/// The integer grid that weights are rounded to.
#[derive(Config, Debug, PartialEq)]
pub struct Quantize {
    /// Bits of a code, 2 to 8.
    pub bits: u8,
    /// Block size: consecutive inputs of one output that share a scale, at least 1; the last may be
    /// smaller. Default, `None`: one scale for each output.
    pub group: Option<usize>,
    /// Whether the grid is symmetric about zero, without a zero point. Default: yes.
    #[config(default = true)]
    pub symmetric: bool,
    /// Whether the range of a group is searched for instead of that of its values. Default: yes.
    #[config(default = true)]
    pub search_range: bool,
    /// How values become codes. Default: compensated, with 8 sweeps.
    #[config(default = "Rounding::refined()")]
    pub rounding: Rounding,
    /// Whether zeros may move while codes are chosen, within an output, or a group of a pattern;
    /// needs compensated codes with sweeps. Default: no, they stay where pruning left them.
    #[config(default = false)]
    pub exchange_zeros: bool,
}

/// How values become codes.
#[derive(Config, Debug, PartialEq)]
#[non_exhaustive]
pub enum Rounding {
    /// Each to its nearest.
    Nearest,
    /// Input by input, the others make good
    /// ([GPTQ, Frantar et al., 2023](https://arxiv.org/abs/2210.17323)), and then again.
    Compensated {
        /// The inputs with the largest second moment first, with ranges fixed beforehand.
        activation_order: bool,
        /// How often every code is set anew to the best one given all others, and scales to the
        /// best ones given all codes; 0 for GPTQ as published.
        sweeps: usize,
    },
}

impl Rounding {
    /// In the order of activations, with 8 sweeps.
    pub fn refined() -> Self {
        Self::Compensated {
            activation_order: true,
            sweeps: 8,
        }
    }
}

/// How the inputs of linear layers are rounded in use: symmetrically, with a scale for each token that
/// comes from the values at hand.
///
/// [`Rounding::Compensated`] solves weights for such inputs; with [`Rounding::Nearest`], as in
/// [`Preset::w8a8`], the errors in the report are those with them, and no code depends on them. The model that
/// [`compress`](crate::OneShot::compress) returns still gives its layers the inputs themselves;
/// [`Compressed::prepare`](crate::Compressed::prepare) makes one that rounds them.
#[derive(Config, Debug, PartialEq)]
pub struct Activations {
    /// Bits of an input, 2 to 8.
    pub bits: u8,
}

/// Factors between a layer and those that read from it.
#[derive(Config, Debug, PartialEq)]
#[non_exhaustive]
pub enum Scaling {
    /// Searched for the smallest error of the quantized layer
    /// ([AWQ, Lin et al., 2024](https://arxiv.org/abs/2306.00978)).
    Awq,
    /// From the largest input and the largest weight
    /// ([SmoothQuant, Xiao et al., 2023](https://arxiv.org/abs/2211.10438)).
    SmoothQuant {
        /// How much of the activations' spread moves into weights, 0 to 1.
        alpha: f64,
    },
}

/// What a compressed layer is to reproduce.
#[derive(Config, Debug, PartialEq, Copy)]
#[non_exhaustive]
pub enum Target {
    /// What the original weights give on the inputs of the compressed model, as published methods
    /// have it.
    OwnInputs,
    /// What the original model computes at this place; where a sum with a residual follows, the sum.
    /// Errors of earlier layers are made good as far as they can be.
    ///
    /// Rows, of tokens or of places of an image, have to be the same ones in both models. Where they are taken by
    /// indices that follow from the data (`argsort`, `topk` and then `select` or `gather`: experts that choose their
    /// tokens, tokens that are dropped by scores), the compressed model may take others, or in another order. In batches in which it
    /// does, layers behind that get the targets of [`OwnInputs`](Self::OwnInputs), up to where rows are written
    /// back to their places by the same indices; the report says in how many
    /// ([`own_targets`](crate::LayerReport::own_targets)). What a product with a mask of zeros and ones moves is not
    /// noticed: take `OwnInputs` there. Indices that the model is given, as tokens of an embedding, are the same in
    /// both, and so are rows that are masked and stay where they are. Sets of indices that are flattened for a
    /// `select` count as reordered as a whole, batches and tokens too. A class token in front of tokens that are
    /// chosen counts as one of them: squeeze its axis out (`squeeze_dim(1)`) before the head.
    Original,
}

/// What a layer's calibration inputs come from.
#[derive(Config, Debug, PartialEq, Copy)]
#[non_exhaustive]
pub enum Order {
    /// Compressed blocks, and the original layers of its own block.
    Block,
    /// All compressed layers before it ("true sequential").
    Layer,
}

impl Preset {
    /// 8-bit weights, one scale for each output, rounded to nearest: of calibration data nothing is asked.
    pub fn w8a16() -> Self {
        let quantize = Quantize::new(8)
            .with_search_range(false)
            .with_rounding(Rounding::Nearest);
        Self::new()
            .with_quantize(Some(quantize))
            .with_target(Target::OwnInputs)
    }

    /// 8-bit weights, one scale for each output, rounded to nearest, and 8-bit inputs, one scale for each
    /// token, with SmoothQuant's factors between them (α = 0.5). `w4a8-g32` solves for such inputs.
    pub fn w8a8() -> Self {
        Self::w8a16().with_8_bit_inputs()
    }

    fn with_8_bit_inputs(self) -> Self {
        self.with_scaling(Some(Scaling::SmoothQuant { alpha: 0.5 }))
            .with_activations(Some(Activations::new(8)))
    }

    /// 4-bit weights with a scale and a zero point for every 128 inputs (`w4a16-g128`), or as many as
    /// [`with_group`](Self::with_group) says.
    pub fn w4a16() -> Self {
        let quantize = Quantize::new(4).with_group(Some(128)).with_symmetric(false);
        Self::new().with_quantize(Some(quantize))
    }

    /// With a scale for every `group` inputs, where there is a grid.
    pub fn with_group(mut self, group: usize) -> Self {
        if let Some(quantize) = &mut self.quantize {
            quantize.group = Some(group);
        }
        self
    }

    /// A fraction of zeros in every weight matrix, chosen as best subsets.
    pub fn sparse(fraction: f64) -> Self {
        let prune = Prune::new(Pattern::PerLayer(fraction), PruneMethod::BestSubset);
        Self::new().with_prune(Some(prune))
    }

    /// This, without what goes beyond the published methods: ranges as they are, no sweeps, the
    /// method's own inputs, all layers of a block at once.
    pub fn as_published(mut self) -> Self {
        self.target = Target::OwnInputs;
        self.order = Order::Block;
        if let Some(quantize) = &mut self.quantize {
            quantize.search_range = false;
            quantize.exchange_zeros = false;
            if let Rounding::Compensated { sweeps, .. } = &mut quantize.rounding {
                *sweeps = 0;
            }
        }
        self
    }

    /// A short name: `w4a16-g32`, `sparse-2:4`. What it does not say has to be read in the value.
    pub fn name(&self) -> String {
        let mut parts = Vec::new();
        if let Some(prune) = &self.prune {
            parts.push(match prune.pattern {
                Pattern::PerLayer(fraction) => format!("sparse-{fraction}"),
                Pattern::PerOutput(fraction) => format!("sparse-{fraction}-per-output"),
                Pattern::NOfM { n, m } => format!("sparse-{n}:{m}"),
            });
        }
        if let Some(quantize) = &self.quantize {
            let inputs = self.activations.as_ref().map_or(16, |one| one.bits);
            parts.push(format!("w{}a{inputs}", quantize.bits));
            parts.extend(quantize.group.map(|group| format!("g{group}")));
            // The default with groups is a zero point, without groups none.
            match (quantize.group.is_some(), quantize.symmetric) {
                (true, true) => parts.push("sym".into()),
                (false, false) => parts.push("asym".into()),
                _ => {}
            }
        }
        match parts.is_empty() {
            true => "none".into(),
            false => parts.join("-"),
        }
    }

    /// Looks for what is out of range or contradicts itself, as [`compress`](crate::OneShot::compress)
    /// does first.
    ///
    /// # Errors
    ///
    /// [`OneShotError::InvalidConfig`].
    pub fn validate(&self) -> Result<(), OneShotError> {
        if !(self.ridge >= 0.0 && self.ridge.is_finite()) {
            return invalid("ridge", self.ridge, "a finite number, at least 0");
        }
        if let Some(quantize) = &self.quantize {
            if !(2..=8).contains(&quantize.bits) {
                return invalid("bits", quantize.bits, "2 to 8");
            }
            if quantize.group == Some(0) {
                return invalid("group", 0, "at least 1");
            }
            let sweeps =
                matches!(quantize.rounding, Rounding::Compensated { sweeps, .. } if sweeps > 0);
            if quantize.exchange_zeros && !(sweeps && self.prune.is_some()) {
                let expected = "false without zeros, and without sweeps over codes";
                return invalid("exchange_zeros", true, expected);
            }
        }
        if let Some(activations) = &self.activations {
            if !(2..=8).contains(&activations.bits) {
                return invalid("activations.bits", activations.bits, "2 to 8");
            }
            if self.quantize.is_none() {
                return invalid("activations", "without quantize", "with weights on a grid");
            }
        }
        match self.prune.as_ref().map(|prune| &prune.pattern) {
            Some(Pattern::PerLayer(fraction) | Pattern::PerOutput(fraction))
                if !(0.0..1.0).contains(fraction) =>
            {
                return invalid("sparsity", fraction, "at least 0 and below 1");
            }
            Some(Pattern::NOfM { n, m }) if *n == 0 || n > m => {
                return invalid("pattern", format!("{n}:{m}"), "n:m with 1 ≤ n ≤ m");
            }
            _ => {}
        }
        if let Some(Scaling::SmoothQuant { alpha }) = self.scaling
            && !(0.0..=1.0).contains(&alpha)
        {
            return invalid("alpha", alpha, "0 to 1");
        }
        if self.scaling.is_some() && self.quantize.is_none() {
            return invalid(
                "scaling",
                "without quantize",
                "with a grid that it prepares for",
            );
        }
        if self.prune.is_none() && self.quantize.is_none() {
            return invalid("preset", "empty", "zeros, a grid, or both");
        }
        if self.blocks.as_ref().is_some_and(Vec::is_empty) {
            return invalid("blocks", "an empty list", "`None`, or with a path at least");
        }
        Ok(())
    }

    /// Looks whether a layer with so many `inputs` can be compressed on so many calibration `rows` (tokens, or
    /// positions of images, over all batches), as [`compress`](crate::OneShot::compress) does of every layer once it
    /// has recorded the forward pass. Sizes are enough: a program that knows them says it before it loads a model.
    /// `path` is what the error says.
    ///
    /// # Errors
    ///
    /// [`OneShotError::DoesNotFit`] where the groups of a pattern do not divide the inputs;
    /// [`OneShotError::TooFewRows`] where something is solved for on fewer rows than inputs.
    pub fn check_layer(&self, path: &str, inputs: usize, rows: usize) -> Result<(), OneShotError> {
        self.check_pattern(path, inputs)?;
        match self.clone().with_real_target().solves() && rows < inputs {
            true => Err(OneShotError::TooFewRows {
                path: path.into(),
                rows,
                inputs,
            }),
            false => Ok(()),
        }
    }

    /// With [`Target::OwnInputs`] where there are factors: a producer that was rescaled does not give what it gave.
    pub(crate) fn with_real_target(mut self) -> Self {
        if self.scaling.is_some() {
            self.target = Target::OwnInputs;
        }
        self
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PerLayer(fraction) | Self::PerOutput(fraction) => write!(f, "{fraction}"),
            Self::NOfM { n, m } => write!(f, "{n}:{m}"),
        }
    }
}

impl FromStr for Pattern {
    type Err = OneShotError;

    /// `0.5`, or `2:4`.
    fn from_str(text: &str) -> Result<Self, OneShotError> {
        let expected = "a fraction (0.5) or kept:of (2:4)";
        if let Some((n, m)) = text.split_once(':') {
            return match (n.parse(), m.parse()) {
                (Ok(n), Ok(m)) => Ok(Self::NOfM { n, m }),
                _ => invalid("sparsity", text, expected),
            };
        }
        match text.parse() {
            Ok(fraction) => Ok(Self::PerLayer(fraction)),
            Err(_) => invalid("sparsity", text, expected),
        }
    }
}

impl FromStr for Preset {
    type Err = OneShotError;

    /// `sparse-S` or `sparse-S-per-output`, `wBa16` or `wBa8`, `wBa16-gN`, with `-sym` or `-asym`, and
    /// both: `sparse-2:4-w4a16-g32`, without SmoothQuant's factors for 8-bit inputs then.
    fn from_str(text: &str) -> Result<Self, OneShotError> {
        let expected = "sparse-S, wBa16 or wBa16-gN (a8 for 8-bit inputs), or both";
        let mut preset = Self::new();
        let mut chooses_symmetry = false;
        let once = |is_first: bool, part| match is_first {
            true => Ok(()),
            false => invalid("preset", text, part),
        };
        let mut parts = text.split('-');
        while let Some(part) = parts.next() {
            // As they are written: no sign, no zeros in front.
            let is_plain =
                |text: &&str| !text.starts_with('+') && (*text == "0" || !text.starts_with('0'));
            let number = |text: Option<&str>| text.filter(is_plain)?.parse::<usize>().ok();
            if part == "sparse" {
                once(preset.prune.is_none(), "with `sparse` once")?;
                // A negative one, say, whose sign parts it from its number.
                let Some(pattern) = parts.next().filter(|part| !part.is_empty()) else {
                    return invalid("preset", text, expected);
                };
                let mut pattern: Pattern = pattern.parse()?;
                let mut rest = parts.clone();
                if let (Pattern::PerLayer(fraction), Some("per"), Some("output")) =
                    (pattern, rest.next(), rest.next())
                {
                    pattern = Pattern::PerOutput(fraction);
                    parts = rest;
                }
                preset.prune = Some(Prune::new(pattern, PruneMethod::BestSubset));
            } else if let Some((bits, inputs @ ("16" | "8"))) =
                part.strip_prefix('w').and_then(|rest| rest.split_once('a'))
            {
                let Some(bits) = number(Some(bits)) else {
                    return invalid("preset", text, expected);
                };
                once(preset.quantize.is_none(), "with one number of bits")?;
                if inputs == "8" {
                    preset = preset.with_8_bit_inputs();
                }
                preset.quantize = match (bits, bits.try_into()) {
                    (8, _) => Self::w8a16().quantize,
                    (_, Ok(bits)) => Some(Quantize::new(bits)),
                    (_, Err(_)) => return invalid("bits", bits, "2 to 8"),
                };
            } else if let (Some(quantize), Some(group)) =
                (&mut preset.quantize, number(part.strip_prefix('g')))
            {
                once(quantize.group.is_none(), "with one size of groups")?;
                quantize.group = Some(group);
                quantize.symmetric = chooses_symmetry && quantize.symmetric;
            } else if let (Some(quantize), "sym" | "asym") = (&mut preset.quantize, part) {
                once(!chooses_symmetry, "with `sym` or `asym` once")?;
                chooses_symmetry = true;
                quantize.symmetric = part == "sym";
            } else {
                return invalid("preset", text, expected);
            }
        }
        // Factors change what layers give, so that the original outputs are no target; zeros need that more.
        if preset.prune.is_some() {
            preset.scaling = None;
        }
        // What is pruned, too, is fitted.
        let mut rounding = preset.quantize.iter().map(|one| &one.rounding);
        if preset.prune.is_none() && rounding.any(|one| *one == Rounding::Nearest) {
            preset.target = Target::OwnInputs;
        }
        preset.validate()?;
        Ok(preset)
    }
}
