//! A whole network with the units removed that pruning left without weights.

use std::collections::HashMap;
use std::fmt;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Bool, Int, Tensor};
use burn_lean_graph::{TensorMapper, Tensors, record};
use burn_lean_reparam::{FloatVisitor, Rejected, catch_quietly, visit_floats};

use super::groups::{Group, Slice, groups};
use super::units::keep;
use crate::PruneError;
use crate::fisher::gradient_matrix::read;
use crate::layerwise::failed;

/// How far an output may be from that of the larger network, relative to the largest: sums have fewer
/// terms, and other orders.
const TOLERANCE: f32 = 1e-4;

/// What became of the units of a network.
///
/// Prints as a table.
#[derive(Debug, Clone, PartialEq)]
pub struct ShrinkReport {
    /// Units that stay or go together, in the order in which they are computed.
    pub groups: Vec<UnitGroup>,
    /// Numbers of all float parameters and buffers, before and after.
    pub numbers: [usize; 2],
}

/// Units that a recorded forward pass ties together: the channels of several layers, where residual sums
/// add them.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitGroup {
    /// Paths of the weights that make them.
    pub makers: Vec<String>,
    /// Paths of the weights that read them.
    pub readers: Vec<String>,
    /// How many there were.
    pub units: usize,
    /// How many stay.
    pub kept: usize,
    /// Why all of them stay, where that is no matter of their weights.
    pub blocked: Option<String>,
}

impl fmt::Display for ShrinkReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for group in &self.groups {
            let (makers, readers) = (group.makers.join(", "), group.readers.join(", "));
            write!(
                f,
                "{makers} → {readers}: {} of {} units",
                group.kept, group.units
            )?;
            match &group.blocked {
                Some(reason) => writeln!(f, ", {reason}")?,
                None => writeln!(f)?,
            }
        }
        let [before, after] = self.numbers;
        writeln!(f, "{after} of {before} numbers")
    }
}

/// Removes the units of a network that pruning left without weights: features between linear layers,
/// channels between convolutions, of all layers that residual sums, normalizations, activations, pooling
/// and reshapes tie together.
///
/// The groups are found in a recording of `forward`, which runs on `inputs`; no edit of the model. A
/// unit goes where each layer that reads it has zeros for it alone, or gets a 0 from it whatever comes
/// in, since all layers that make it have zeros alone and what is added on the way ends at 0 (a bias of 0
/// in front of a ReLU). At least one unit of a group stays. Masks are folded in; parameters that got
/// smaller have new identities. The network comes back in evaluation mode, without autodiff, and computes
/// what it computed, up to the rounding of shorter sums: that is checked on `inputs`.
///
/// Units stay, with the reason in the report, where the recording ties them to what is not followed: grouped
/// convolutions, attention, layer normalization, concatenation, results. For a constant unit that is no 0,
/// [`shrink_linear`](crate::shrink_linear) and [`shrink_conv`](crate::shrink_conv) move it into a bias.
///
/// ```
/// use burn::module::{Module, Param};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor, activation::relu};
/// use burn_lean_prune::shrink;
///
/// #[derive(Module, Debug)]
/// struct Net {
///     body: Linear,
///     head: Linear,
/// }
///
/// impl Net {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.head.forward(relu(self.body.forward(x)))
///     }
/// }
///
/// let device = Device::flex();
/// let mut net = Net {
///     body: LinearConfig::new(2, 3).init(&device),
///     head: LinearConfig::new(3, 1).init(&device),
/// };
/// net.body.weight = Param::from_data([[1.0, 0.0, 2.0], [3.0, 0.0, 4.0]], &device);
/// net.body.bias = Some(Param::from_data([0.5, -2.0, 0.0], &device));
/// net.head.weight = Param::from_data([[1.0], [10.0], [0.0]], &device);
///
/// // The second feature is always relu(-2), the third is never read.
/// let x = Tensor::<2>::ones([1, 2], &device);
/// let (net, report) = shrink(net, x, |net, x| net.forward(x))?;
/// assert_eq!(net.head.weight.dims(), [1, 1]);
/// assert_eq!((report.groups[0].units, report.groups[0].kept), (3, 1));
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// # Errors
///
/// The model comes back in the error.
/// - [`PruneError::NotRecorded`] where the forward pass cannot be recorded.
/// - [`PruneError::CannotShrink`] where the forward pass does not take the smaller network, since it has
///   sizes of its own, or its outputs are others.
/// - [`PruneError::Device`]: reading from the device failed.
pub fn shrink<M: Module, I: Tensors, O: Tensors>(
    model: M,
    inputs: I,
    forward: impl Fn(&M, I) -> O,
) -> Result<(M, ShrinkReport), Rejected<M, PruneError>> {
    match try_shrink(&model, &inputs, &forward) {
        Ok(shrunk) => Ok(shrunk),
        Err(error) => Err(Rejected::new(model, error)),
    }
}

fn try_shrink<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    inputs: &I,
    forward: &impl Fn(&M, I) -> O,
) -> Result<(M, ShrinkReport), PruneError> {
    let plain = model.valid().materialize();
    let given = || inputs.map_tensors(&mut Evaluated);
    let recording = record(&plain, &given(), forward).map_err(failed)?;
    let mut values = Values::default();
    visit_floats(&plain, &mut values);
    if let Some(error) = values.error {
        return Err(error);
    }
    let shapes: HashMap<String, Vec<usize>> = recording
        .graph()
        .parameters()
        .iter()
        .map(|parameter| (parameter.path.clone(), parameter.shape.clone()))
        .collect();
    let found = groups(recording.graph(), &values.found);
    let mut report = ShrinkReport {
        groups: Vec::new(),
        numbers: [values.numbers, 0],
    };
    let mut smaller = Smaller::default();
    for group in found {
        let kept = match &group.blocked {
            Some(_) => (0..group.units).collect(),
            None => kept(&group, &values.found, &shapes),
        };
        let paths = |slices: &mut dyn Iterator<Item = &Slice>| -> Vec<String> {
            slices.map(|slice| slice.path.clone()).collect()
        };
        report.groups.push(UnitGroup {
            makers: paths(&mut group.makers.iter()),
            readers: paths(&mut group.readers.iter().map(|reader| &reader.slice)),
            units: group.units,
            kept: kept.len(),
            blocked: group.blocked.clone(),
        });
        if kept.len() == group.units {
            continue;
        }
        let readers = group.readers.iter().map(|reader| &reader.slice);
        for slice in group.makers.iter().chain(&group.vectors).chain(readers) {
            let of_unit = |unit: &usize| unit * slice.positions..(unit + 1) * slice.positions;
            let indices = kept.iter().flat_map(of_unit).collect();
            let of_path = smaller.slices.entry(slice.path.clone()).or_default();
            of_path.push((slice.axis, indices));
        }
    }
    // Burn maps running statistics in place: those of a copy.
    let shrunk = plain.valid().map(&mut smaller);
    let mut left = Values::default();
    visit_floats(&shrunk, &mut left);
    report.numbers[1] = left.numbers;
    let compute = |model: &M| {
        let outputs = catch_quietly(|| forward(model, given()));
        let outputs = outputs.map_err(|message| PruneError::CannotShrink {
            reason: format!("the forward pass does not take the smaller network: {message}"),
        })?;
        let mut read = Outputs::default();
        let _ = outputs.map_tensors(&mut read);
        read.error.map_or(Ok(read.found), Err)
    };
    let (expected, found) = (compute(&plain)?, compute(&shrunk)?);
    let largest = expected.iter().fold(1.0_f32, |most, x| most.max(x.abs()));
    let near = |(a, b): (&f32, &f32)| {
        (a - b).abs() <= TOLERANCE * largest || (a.is_nan() && b.is_nan()) || a == b
    };
    if expected.len() != found.len() || !expected.iter().zip(&found).all(near) {
        return Err(PruneError::CannotShrink {
            reason:
                "the smaller network has other outputs, so its forward pass uses the units in a \
                     way that a recording does not show"
                    .into(),
        });
    }
    Ok((shrunk, report))
}

/// The units that some layer reads.
fn kept(
    group: &Group,
    values: &HashMap<String, Vec<f32>>,
    shapes: &HashMap<String, Vec<usize>>,
) -> Vec<usize> {
    let mut read = vec![false; group.units];
    for reader in &group.readers {
        let Slice {
            path,
            axis,
            positions,
        } = &reader.slice;
        let (Some(values), Some(shape)) = (values.get(path), shapes.get(path)) else {
            return (0..group.units).collect();
        };
        let inner: usize = shape[axis + 1..].iter().product();
        for (index, value) in values.iter().enumerate() {
            let unit = index / inner % shape[*axis] / positions;
            if *value != 0.0 && reader.constants[unit] != Some(0.0) {
                read[unit] = true;
            }
        }
    }
    let mut kept: Vec<usize> = (0..group.units).filter(|unit| read[*unit]).collect();
    if kept.is_empty() {
        // No tensor without elements: many kernels cannot compute with one.
        kept.extend((group.units > 0).then_some(0));
    }
    kept
}

#[derive(Default)]
struct Values {
    found: HashMap<String, Vec<f32>>,
    numbers: usize,
    error: Option<PruneError>,
}

impl FloatVisitor for Values {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let value = param.base().without_autodiff();
        self.numbers += value.shape().num_elements();
        match read(value) {
            Ok(values) => {
                self.found.insert(path.to_string(), values);
            }
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }
}

/// Parameters at some indices of their axes.
#[derive(Default)]
struct Smaller {
    path: Vec<String>,
    slices: HashMap<String, Vec<(usize, Vec<usize>)>>,
}

impl ModuleMapper for Smaller {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let slices = self.slices.get(&self.path.join("."));
        let slices = slices.into_iter().flatten();
        slices.fold(param, |param, (axis, kept)| keep(param, *axis, kept))
    }
}

/// Inputs of an evaluation.
struct Evaluated;

impl TensorMapper for Evaluated {
    fn float<const D: usize>(&mut self, x: &Tensor<D>) -> Tensor<D> {
        x.clone().without_autodiff()
    }

    fn int<const D: usize>(&mut self, x: &Tensor<D, Int>) -> Tensor<D, Int> {
        x.clone().without_autodiff()
    }

    fn bool<const D: usize>(&mut self, x: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        x.clone().without_autodiff()
    }
}

/// The numbers of a result.
#[derive(Default)]
struct Outputs {
    found: Vec<f32>,
    error: Option<PruneError>,
}

impl TensorMapper for Outputs {
    fn float<const D: usize>(&mut self, x: &Tensor<D>) -> Tensor<D> {
        match read(x.clone().without_autodiff()) {
            Ok(values) => self.found.extend(values),
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
        x.clone()
    }

    fn int<const D: usize>(&mut self, x: &Tensor<D, Int>) -> Tensor<D, Int> {
        x.clone()
    }

    fn bool<const D: usize>(&mut self, x: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        x.clone()
    }
}
