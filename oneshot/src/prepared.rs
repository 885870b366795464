//! From compressed weights to quantizers, which files and engines read.

use std::collections::HashMap;

use burn::module::{Module, ParamGroup};
use burn_lean_quant::rounding::{GroupParams, set_weight_qparams};
use burn_lean_quant::{
    FakeQuantizeConfig, Granularity, Mapping, NumberFormat, ObserverConfig, Override, QatConfig,
    QuantError, Scheme, WeightConfig, WeightGranularity,
};
use burn_lean_reparam::{Rejected, each_float};

use crate::{Activations, Compressed, CompressedWeight, Grid, OneShotError};

/// A compressed model whose weights carry quantizers: [`Compressed::prepare`].
#[derive(Debug, Clone)]
pub struct Prepared<M> {
    /// The model; it computes what the compressed one does, bit by bit, where inputs are not rounded.
    pub model: M,
    /// Path of each weight on a grid that no quantizer has, and why: it stays float.
    pub left_float: Vec<(String, String)>,
}

impl<M: Module> Compressed<M> {
    /// The model with quantizers that have the codes, scales and zero points of its weights, as
    /// [`QatConfig`] attaches them: for `PretrainedFolder` of burn-lean-quant, which vLLM loads, for
    /// the ONNX files and the engine of burn-lean-deploy, and for QAT from here on.
    ///
    /// With `activations`, the inputs of linear layers among these are rounded, too (those of convolutions stay
    /// floats), as the preset says
    /// ([`Preset::activations`](crate::Preset::activations)): symmetrically, with a scale for each token of the
    /// values at hand.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_lean_oneshot::OneShot;
    /// use burn_lean_quant::quantized_weights;
    ///
    /// let device = Device::flex();
    /// let model: Linear = LinearConfig::new(16, 8).init(&device);
    /// let batches = [0, 1].map(|_| Tensor::<2>::random([32, 16], Distribution::Default, &device));
    /// let done = OneShot::new("w4a16-g8".parse()?).compress(model, batches, Linear::forward)?;
    /// let codes = done.weights[0].grid.clone().unwrap();
    /// let prepared = done.prepare(None)?;
    /// assert!(prepared.left_float.is_empty());
    /// let quantized = quantized_weights(&prepared.model)?;
    /// // `[inputs, outputs]`, as the layer has them.
    /// assert_eq!(quantized[0].1.codes()[8], i16::from(codes.codes[1]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// With the model inside: [`OneShotError::Quantization`], of a weight that carries a reparameterization
    /// for example; [`OneShotError::NothingOnAGrid`] where no weight is on a grid that a quantizer has;
    /// [`OneShotError::Changed`] for a weight that is not the one that was compressed.
    pub fn prepare(
        self,
        activations: Option<&Activations>,
    ) -> Result<Prepared<M>, Rejected<M, OneShotError>> {
        if let Err(error) = self.check_unchanged() {
            return Err(Rejected::new(self.model, error));
        }
        let mut shapes: HashMap<String, Vec<usize>> = HashMap::new();
        each_float(&self.model, |at, float| {
            shapes.insert(at.path(), float.shape().to_vec());
        });
        let (mut overrides, mut qparams) = (Vec::new(), HashMap::new());
        let mut left_float = Vec::new();
        for weight in &self.weights {
            let Some(grid) = &weight.grid else { continue };
            let shape = shapes.get(&weight.path).map_or(&[][..], |shape| shape);
            match Quantizer::of(weight, grid, shape) {
                Ok(quantizer) => {
                    // Tokens are rows of linear layers.
                    let is_float = activations.is_some() && shape.len() > 2;
                    overrides.push(match is_float {
                        true => quantizer.choice.with_skip_activation(Some(true)),
                        false => quantizer.choice,
                    });
                    qparams.insert(weight.path.clone(), quantizer.qparams);
                }
                Err(why) => left_float.push((weight.path.clone(), why)),
            }
        }
        if qparams.is_empty() {
            let first = left_float.into_iter().next();
            return Err(Rejected::new(
                self.model,
                OneShotError::NothingOnAGrid { first },
            ));
        }
        let rejected =
            |rejected: Rejected<M, QuantError>| rejected.map_error(OneShotError::Quantization);
        let config = QatConfig::new()
            .with_activation(activations.map(inputs))
            .with_attention(false)
            .with_group(Some(ParamGroup::from_paths(
                qparams.keys().cloned().collect(),
            )))
            .with_overrides(overrides);
        let model = config.prepare(self.model).map_err(rejected)?;
        Ok(Prepared {
            model: set_weight_qparams(model, &qparams).map_err(rejected)?,
            left_float,
        })
    }
}

/// How inputs are rounded.
fn inputs(activations: &Activations) -> FakeQuantizeConfig {
    let scheme = Scheme::symmetric(NumberFormat::int(activations.bits).narrow())
        .with_granularity(Granularity::PerToken);
    FakeQuantizeConfig::new(scheme).with_observer(ObserverConfig::Memoryless)
}

/// What quantizes a weight.
struct Quantizer {
    choice: Override,
    qparams: GroupParams,
}

impl Quantizer {
    /// The quantizer that has this grid, or why there is none; `shape` is that of the parameter.
    fn of(weight: &CompressedWeight, grid: &Grid, shape: &[usize]) -> Result<Self, String> {
        let Grid {
            bits,
            group,
            symmetric,
            codes,
            scales,
            zero_points,
        } = grid;
        if !(2..=8).contains(bits) {
            return Err(format!("codes of {bits} bits; quantizers have 2 to 8"));
        }
        // The inputs of a group are neighbouring channels, each with its whole window.
        let window: usize = match weight.transposed {
            true => 1,
            false => shape.iter().skip(2).product(),
        };
        let granularity = match group {
            group if *group >= weight.inputs => WeightGranularity::PerChannel,
            group if group % window == 0 => WeightGranularity::PerBlock {
                size: group / window,
            },
            group => {
                return Err(format!(
                    "groups of {group} inputs, which cut windows of {window}"
                ));
            }
        };
        let format = match symmetric {
            true if codes.contains(&0) => NumberFormat::int(*bits),
            true => NumberFormat::int(*bits).narrow(),
            false => NumberFormat::uint(*bits),
        };
        let mapping = match symmetric {
            true => Mapping::Symmetric,
            false => Mapping::Affine,
        };
        let config = WeightConfig::new()
            .with_format(format)
            .with_mapping(mapping)
            .with_granularity(granularity);
        let choice = Override::new(weight.path.clone()).with_weight(Some(config));
        let choice = match shape.len() {
            // Of a module of the user's own, too: kernels have their outputs first.
            2 => choice.with_axis(Some(usize::from(weight.transposed))),
            3.. if !weight.transposed && shape[0] == weight.outputs => choice.with_axis(Some(0)),
            _ => {
                return Err(format!(
                    "a parameter of shape {shape:?}, of which no axis is known as that of its {} outputs",
                    weight.outputs
                ));
            }
        };
        let groups = scales.len() / weight.outputs.max(1);
        // Groups of the parameter, row by row.
        let place = |at: usize| match weight.transposed {
            true => at % weight.outputs * groups + at / weight.outputs,
            false => at,
        };
        let places = 0..scales.len();
        Ok(Self {
            choice,
            qparams: GroupParams {
                scales: places.clone().map(|at| scales[place(at)]).collect(),
                zero_points: match symmetric {
                    true => Vec::new(),
                    false => places.map(|at| f32::from(zero_points[place(at)])).collect(),
                },
            },
        })
    }
}
