//! Axes whose size stays open: found by recording the forward pass with other sizes.

mod analysis;
mod loops;
mod probe;
mod sizes;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use burn::backend::ir::TensorId;
use burn::module::Module;
use burn_lean_graph::{Graph, Rolled, Tensors, record, signature};

use crate::{DeployError, Dimension};
use analysis::analyse;
use loops::sample_of_fewer;
use probe::{Sample, resized, with_counts};
use sizes::Sizes;
pub(crate) use sizes::{Known, Number, Size};

/// The name of the first axis of the inputs.
const BATCH: &str = "batch";

/// Axes of inputs that have one size, which stays open under a name.
///
/// ```
/// use burn_lean_deploy::OpenAxis;
///
/// // The second axis of the first input, and the first one of the second.
/// let sequence = OpenAxis::new("sequence", [(0, 1), (1, 0)]);
/// assert_eq!(sequence.axes(), [(0, 1), (1, 0)]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenAxis {
    name: String,
    axes: Vec<(usize, usize)>,
}

impl OpenAxis {
    /// Under this name; each axis by the position of its input, in the order of the forward pass, and its
    /// own, from 0.
    pub fn new(name: impl Into<String>, axes: impl IntoIterator<Item = (usize, usize)>) -> Self {
        Self {
            name: name.into(),
            axes: axes.into_iter().collect(),
        }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Positions of inputs and of their axes.
    pub fn axes(&self) -> &[(usize, usize)] {
        &self.axes
    }

    /// The size that all of them have in the recording.
    fn size(&self, shapes: &[Vec<usize>]) -> usize {
        let (input, axis) = self.axes[0];
        shapes[input][axis]
    }

    /// The sizes to record with: some may be the same for neighbours, or cut off at some number.
    fn others(&self, size: usize) -> Vec<usize> {
        let all = match self.name == BATCH {
            true => vec![size + 1, 2 * size + 3, 1],
            false => vec![
                size + 1,
                size + 2,
                size + 3,
                size + 4,
                size + 7,
                2 * size + 3,
                size - 1,
                size.saturating_sub(2),
                size / 2,
                1,
                // Of what is halved on the way, as a U-Net does, multiples alone may fit.
                2 * size,
                3 * size,
                4 * size,
                5 * size,
            ],
        };
        let mut seen = HashSet::from([0, size]);
        all.into_iter().filter(|size| seen.insert(*size)).collect()
    }

    /// How many of them the forward pass has to take.
    fn needed(&self) -> usize {
        match self.name == BATCH {
            true => 2,
            false => 3,
        }
    }
}

/// What the sizes of all tensors are, where some of the inputs stay open.
#[derive(Debug, Default)]
pub(crate) struct Open {
    sizes: HashMap<TensorId, Vec<Size>>,
    /// The sizes that operations have as numbers, by their positions.
    numbers: HashMap<usize, Vec<Size>>,
    /// The numbers of operations that are sizes, by their results.
    scalars: HashMap<TensorId, Number>,
    /// Counts made on the host: their first numbers and steps.
    counted: HashMap<TensorId, (Number, i64)>,
    known: Sizes,
    /// Why the batch stays fixed.
    pub(crate) fixed_batch: Option<String>,
}

/// What a recording with other sizes gives.
enum Probed {
    /// The forward pass does not take them.
    Refused(String),
    /// It does something else.
    Other(String),
    /// It may be the same, with loops too short to be seen.
    Short(Box<Graph>),
    Same(Sample),
}

/// An axis that can stay open, with the recordings that show it.
struct Found {
    axis: OpenAxis,
    samples: Vec<(usize, Sample)>,
}

impl Open {
    /// Records `forward` again, with other sizes of these axes and of the batch, and compares the
    /// operations. A size that the forward pass refuses is left out.
    ///
    /// The batch stays fixed where it has to. Of a `rolled` graph, loops may have other numbers of steps.
    ///
    /// # Errors
    ///
    /// [`DeployError::OpenAxis`] for an axis that has to stay fixed, [`DeployError::InvalidConfig`].
    pub(crate) fn find<M: Module, I: Tensors, O: Tensors>(
        model: &M,
        inputs: &I,
        axes: &[OpenAxis],
        forward: &impl Fn(&M, I) -> O,
        plain: &Graph,
        rolled: Option<&Rolled>,
    ) -> Result<Self, DeployError> {
        let graph = rolled.map_or(plain, |rolled| &rolled.graph);
        let shapes = signature(inputs).into_iter().map(|(shape, _)| shape);
        let shapes: Vec<Vec<usize>> = shapes.collect();
        check(axes, &shapes)?;
        let probe = |shapes: &[Vec<usize>]| {
            let recording = match record(model, &resized(inputs, shapes), forward) {
                Err(error) => return Probed::Refused(error.to_string()),
                Ok(recording) => recording.fold_rows(),
            };
            let mut other = Cow::Borrowed(recording.graph());
            if let Some(rolled) = rolled {
                match other.rolled() {
                    Some(same) if same.loops() == rolled.loops() => {
                        other = Cow::Owned(same.graph);
                    }
                    _ => return Probed::Short(Box::new(other.into_owned())),
                }
            }
            match Sample::compare(graph, &other, shapes) {
                Err(why) => Probed::Other(with_counts(why, graph, &other)),
                Ok(sample) if sample.is_possible() => Probed::Same(sample),
                Ok(_) => Probed::Refused("windows are wider than what is left".into()),
            }
        };
        let finder = Finder {
            graph,
            own: Sample::of(graph, &shapes),
            shapes: &shapes,
            rolled,
            probe: &probe,
        };
        let mut fixed_batch = None;
        let mut found: Vec<Found> = Vec::new();
        if axes.iter().all(|axis| axis.name != BATCH) {
            match batch(axes, &shapes).and_then(|axis| finder.alone(&axis)) {
                Ok(batch) => found.push(batch),
                Err(why) => fixed_batch = Some(why),
            }
        }
        for axis in axes {
            let refused = |reason| DeployError::OpenAxis {
                name: axis.name.clone(),
                reason,
            };
            found.push(finder.alone(axis).map_err(refused)?);
        }
        let mut open = finder.together(&found);
        if let (Err(why), true) = (&open, found.len() > axes.len()) {
            fixed_batch = Some(why.clone());
            found.remove(0);
            open = finder.together(&found);
        }
        let mut open = open.map_err(|reason| {
            let names: Vec<&str> = axes.iter().map(|axis| &*axis.name).collect();
            DeployError::OpenAxis {
                name: names.join("` and `"),
                reason,
            }
        })?;
        open.fixed_batch = fixed_batch;
        Ok(open)
    }

    /// Whether the shape of a tensor is open, or the number that it is computed with.
    pub(crate) fn depends(&self, id: TensorId) -> bool {
        let sizes = self.sizes.get(&id);
        sizes.is_some_and(|sizes| sizes.iter().any(Size::is_open))
            || self.scalars.contains_key(&id)
            || self.counted.contains_key(&id)
    }

    /// The sizes of a tensor, which has this shape in the recording.
    pub(crate) fn sizes(&self, id: TensorId, shape: &[usize]) -> Vec<Size> {
        let fixed = || shape.iter().map(|size| Size::Fixed(*size)).collect();
        self.sizes.get(&id).cloned().unwrap_or_else(fixed)
    }

    /// As a model says it.
    pub(crate) fn dimensions(&self, sizes: &[Size]) -> Vec<Dimension> {
        let dimension = |size: &Size| match size {
            Size::Fixed(size) => Dimension::Fixed(*size),
            Size::Open(..) => Dimension::Open(self.known.text(size)),
        };
        sizes.iter().map(dimension).collect()
    }

    /// The sizes that an operation has as numbers: start and end of each range, times of a repetition.
    pub(crate) fn numbers(&self, node: usize) -> &[Size] {
        self.numbers.get(&node).map_or(&[], Vec::as_slice)
    }

    /// First number and step of a constant that is a count of an open length.
    pub(crate) fn counted(&self, id: TensorId) -> Option<&(Number, i64)> {
        self.counted.get(&id)
    }

    /// The number of the operation with this result, where it is a size.
    pub(crate) fn scalar(&self, result: TensorId) -> Option<&Number> {
        self.scalars.get(&result)
    }

    pub(crate) fn known(&self, at: usize) -> &Known {
        self.known.known(at)
    }

    pub(crate) fn text(&self, size: &Size) -> String {
        self.known.text(size)
    }

    /// Whether a size is found at this tensor.
    pub(crate) fn is_of(&self, size: &Size, tensor: TensorId) -> bool {
        self.known.is_of(size, tensor)
    }
}

struct Finder<'a> {
    graph: &'a Graph,
    /// Of the exported recording.
    own: Sample,
    shapes: &'a [Vec<usize>],
    /// Where loops may have other numbers of steps.
    rolled: Option<&'a Rolled>,
    probe: &'a dyn Fn(&[Vec<usize>]) -> Probed,
}

impl Finder<'_> {
    /// A recording with other sizes of axes.
    fn probe(&self, sizes: &[(&OpenAxis, usize)]) -> Probed {
        (self.probe)(&self.resized(sizes))
    }

    /// The shapes of the inputs with these sizes.
    fn resized(&self, sizes: &[(&OpenAxis, usize)]) -> Vec<Vec<usize>> {
        let mut shapes = self.shapes.to_vec();
        for (open, size) in sizes {
            for (input, axis) in &open.axes {
                shapes[*input][*axis] = *size;
            }
        }
        shapes
    }

    /// One axis of other sizes.
    fn alone(&self, axis: &OpenAxis) -> Result<Found, String> {
        let name = &axis.name;
        let (mut samples, mut short, mut refused) = (Vec::new(), Vec::new(), None);
        let own = axis.size(self.shapes);
        let mut sizes = axis.others(own);
        if self.rolled.is_some() && *name != BATCH {
            // What begins to differ with the second and third step.
            let more = [2, 3].into_iter().filter(|size| *size != own);
            let more: Vec<usize> = more.filter(|size| !sizes.contains(size)).collect();
            sizes.extend(more);
        }
        for size in sizes {
            match self.probe(&[(axis, size)]) {
                Probed::Same(sample) => samples.push((size, sample)),
                Probed::Short(one) if size < axis.size(self.shapes) => short.push((size, one)),
                Probed::Short(_) => return Err(format!("a {name} of {size} has other loops")),
                // What refuses a size has no result that a file could miss.
                Probed::Refused(why) => refused = refused.or(Some(why)),
                Probed::Other(why) if size == 1 => {
                    return Err(format!("a {name} of one is another computation: {why}"));
                }
                Probed::Other(why) => return Err(why),
            }
        }
        if samples.len() < axis.needed() {
            let (why, needed) = (refused.unwrap_or_default(), axis.needed());
            return Err(match samples.len() {
                0 => format!("the forward pass refuses another {name}: {why}"),
                taken => format!(
                    "the forward pass takes {taken} other sizes of {name}, of which {needed} are needed: \
                     record it with one whose neighbours and multiples it takes. Of another {name}: {why}"
                ),
            });
        }
        let mut fewer = Vec::new();
        for (size, graph) in short {
            let shapes = self.resized(&[(axis, size)]);
            let shown = self
                .rolled
                .and_then(|rolled| sample_of_fewer(rolled, &graph, &shapes, &samples));
            let shown = shown.ok_or_else(|| {
                format!("a {name} of {size} is another computation, not one whose loops have fewer steps")
            })?;
            fewer.extend(shown.map(|sample| (size, sample)));
        }
        samples.extend(fewer);
        let each = samples.iter().map(|(_, sample)| sample);
        let all: Vec<&Sample> = std::iter::once(&self.own).chain(each).collect();
        analyse(self.graph, &[axis], &all)?;
        Ok(Found {
            axis: axis.clone(),
            samples,
        })
    }

    /// All axes, also of other sizes at the same time: so that products of them are told from sums.
    fn together(&self, found: &[Found]) -> Result<Open, String> {
        let (mut joint, mut refused) = (Vec::new(), None);
        for round in 0..if found.len() > 1 { 4 } else { 0 } {
            let sizes = found.iter().enumerate().map(|(place, one)| {
                let next = (round * (place + 1) + place) % one.samples.len();
                (&one.axis, one.samples[next].0)
            });
            match self.probe(&sizes.collect::<Vec<_>>()) {
                Probed::Same(sample) => joint.push(sample),
                Probed::Refused(why) => refused = refused.or(Some(why)),
                Probed::Short(_) => {
                    refused = refused.or_else(|| Some("loops are too short to be seen".into()));
                }
                Probed::Other(why) => return Err(why),
            }
        }
        if let (true, Some(why)) = (joint.is_empty(), refused) {
            return Err(format!(
                "the forward pass refuses other sizes of all: {why}"
            ));
        }
        let axes: Vec<&OpenAxis> = found.iter().map(|one| &one.axis).collect();
        let alone = found.iter().flat_map(|one| &one.samples);
        let alone = alone.map(|(_, sample)| sample);
        let own = std::iter::once(&self.own);
        let all: Vec<&Sample> = own.chain(alone).chain(&joint).collect();
        analyse(self.graph, &axes, &all)
    }
}

/// The first axes of the inputs, those that have other names left out.
fn batch(axes: &[OpenAxis], shapes: &[Vec<usize>]) -> Result<OpenAxis, String> {
    let is_named = |first: &(usize, usize)| axes.iter().any(|axis| axis.axes.contains(first));
    let all = (0..shapes.len()).map(|input| (input, 0));
    let firsts: Vec<(usize, usize)> = all.filter(|first| !is_named(first)).collect();
    let mut sizes = firsts.iter().map(|(input, _)| shapes[*input].first());
    let size = sizes.next().flatten();
    let size = *size.ok_or("there is no input with a first axis that has no other name")?;
    if sizes.any(|other| other != Some(&size)) {
        return Err("the first axes of the inputs differ".into());
    }
    match size {
        0 => Err("the recorded batch is empty".into()),
        _ => Ok(OpenAxis::new(BATCH, firsts)),
    }
}

/// Whether there are such axes, each with one name and one size.
fn check(axes: &[OpenAxis], shapes: &[Vec<usize>]) -> Result<(), DeployError> {
    let invalid = |value: String, expected| {
        Err(DeployError::InvalidConfig {
            field: "open_axes",
            value,
            expected,
        })
    };
    let (mut names, mut taken) = (HashSet::new(), HashSet::new());
    for OpenAxis { name, axes } in axes {
        if name.is_empty() || !names.insert(name) {
            return invalid(format!("`{name}`"), "a name that no other axis has");
        }
        let mut sizes = HashSet::new();
        for (input, axis) in axes {
            let at = format!("axis {axis} of input {input} for `{name}`");
            match shapes.get(*input).and_then(|shape| shape.get(*axis)) {
                None => return invalid(at, "an axis of an input"),
                Some(0) => return invalid(at, "an axis that is not empty"),
                Some(size) => sizes.insert(*size),
            };
            if !taken.insert((input, axis)) {
                return invalid(at, "an axis with one name");
            }
        }
        if sizes.len() != 1 {
            let value = format!("`{name}` of {} sizes", sizes.len());
            return invalid(value, "one size for all axes of a name");
        }
    }
    Ok(())
}
