//! What an export needs of a recorded forward pass: the scale and zero point of each operand, and the
//! codes of each weight.

use std::collections::{BTreeMap, HashMap};

use burn::module::Module;
use burn_lean_graph::Graph;

use crate::range::observer::read;
use crate::{
    FakeQuantize, QuantError, QuantizedTensor, Scheme, Site, module::Located, quantized_weights,
    quantizers,
};

/// The quantization of a recorded forward pass.
#[derive(Debug, Clone)]
pub struct QuantizedGraph {
    /// The operands of the graph's operations that are quantized, in the order of its nodes.
    pub operands: Vec<QuantizedOperand>,
    /// The quantized weights, by path: codes, scales and zero points.
    pub weights: BTreeMap<String, QuantizedTensor>,
}

/// An operand of an operation, quantized by a quantizer of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedOperand {
    /// Position of the operation in the graph.
    pub node: usize,
    /// Position of the operand, as in [`OperationIr::inputs`](burn::backend::ir::OperationIr::inputs).
    pub operand: usize,
    /// Path of the quantizer.
    pub quantizer: String,
    /// What it quantizes.
    pub site: Site,
    /// Path of the parameter that carries it; `None` if it stands alone.
    pub parameter: Option<String>,
    /// The numbers, and which elements share a scale. A view between the quantizer and the operation
    /// may have moved the axes: a scheme per tensor is the same before and after it.
    pub scheme: Scheme,
    /// Scale and zero point; `None` where they are those of the values at hand.
    pub qparams: Option<HostQuantParams>,
}

/// Scale and zero point on the host, one for each group of the scheme.
#[derive(Debug, Clone, PartialEq)]
pub struct HostQuantParams {
    /// Value of one step, positive.
    pub scale: Vec<f32>,
    /// The code of zero, an integer.
    pub zero_point: Vec<f32>,
}

impl QuantizedGraph {
    /// The quantization of `graph`, a recording of `model`: `graph` shows the quantizers as nodes
    /// of the name `fake_quantize`.
    ///
    /// `model` is [`valid`](Module::valid), with its ranges. Quantizers that do not quantize are
    /// left out. Reads from the device.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_graph::record;
    /// use burn_lean_quant::{QatConfig, QuantizedForward, deploy::QuantizedGraph};
    ///
    /// let device = Device::flex();
    /// let model = QatConfig::new().prepare(LinearConfig::new(4, 2).init(&device))?;
    /// let x = Tensor::<2>::from_floats([[0.0, 1.0, 2.0, 2.55]], &device);
    /// let model = QuantizedForward::new()
    ///     .calibrate(model, [x.clone()], |model, x| model.forward(x))?;
    ///
    /// let recording = record(&model, &x, |model, x| model.forward(x))?;
    /// let quantized = QuantizedGraph::of(recording.graph(), &model)?;
    /// let input = quantized.operands[0].qparams.as_ref().unwrap();
    /// assert_eq!((input.scale[0], input.zero_point[0]), (0.01, 0.0));
    /// assert_eq!(quantized.weights["weight"].shape(), [4, 2]);
    /// # Ok::<(), burn_lean_quant::QuantError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`QuantError`] where a quantizer has no useful range or weights cannot be quantized;
    /// [`QuantError::OtherQuantizers`] where the graph is of another model.
    pub fn of<M: Module>(graph: &Graph, model: &M) -> Result<Self, QuantError> {
        let located: HashMap<String, Located> = quantizers(model)
            .into_iter()
            .map(|located| (located.path.clone(), located))
            .collect();
        let mut known: HashMap<String, Option<HostQuantParams>> = HashMap::new();
        let mut operands = Vec::new();
        for (node, operand, hook) in graph.hooked_operands() {
            let path = &graph.hooks()[hook].path;
            let Some(located) = located.get(path) else {
                return Err(QuantError::OtherQuantizers { path: path.clone() });
            };
            let quantizer = &located.quantizer;
            if !quantizer.phase().quantizes() {
                continue;
            }
            let qparams = match known.get(path) {
                Some(known) => known.clone(),
                None => {
                    let found = on_host(quantizer).map_err(|error| error.at(located.name()))?;
                    known.insert(path.clone(), found.clone());
                    found
                }
            };
            operands.push(QuantizedOperand {
                node,
                operand,
                quantizer: path.clone(),
                site: located.site,
                parameter: located.parameter.clone(),
                scheme: quantizer.scheme().clone(),
                qparams,
            });
        }
        Ok(Self {
            operands,
            weights: quantized_weights(model)?.into_iter().collect(),
        })
    }

    /// The quantization of one operand.
    pub fn operand(&self, node: usize, operand: usize) -> Option<&QuantizedOperand> {
        self.operands
            .iter()
            .find(|one| (one.node, one.operand) == (node, operand))
    }
}

fn on_host(quantizer: &FakeQuantize) -> Result<Option<HostQuantParams>, QuantError> {
    if !quantizer.has_static_range() && !quantizer.is_learning() {
        return Ok(None);
    }
    let qparams = quantizer.qparams()?;
    Ok(Some(HostQuantParams {
        scale: read(qparams.scale)?,
        zero_point: read(qparams.zero_point)?,
    }))
}
