//! Units cut out of a whole model.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ParamGroup, ParamId, Reparameterization};
use burn::tensor::{DType, Tensor};
use burn_lean_graph::{FixedBy, Recording, TensorMapper, Tensors, UnitGroup, cloned, record};
use burn_lean_reparam::{Rejected, Training, attached, catch_quietly};

use super::cut::{Weights, cut, silence};
use super::readers::{self, Readers};
use super::report::{ShrinkReport, ShrunkGroup};
use super::scores::Scored;
use crate::host::read;
use crate::layerwise::inputs::Plain;
use crate::model::{checks, flops};
use crate::{Mask, PruneError};

/// Cuts whole units out of a model: channels, hidden features, with everything that belongs to them.
///
/// A recorded forward pass says which slices of which parameters go together, across residual sums,
/// norms, concatenations and flattened images ([`Graph::units`](burn_lean_graph::Graph::units)). What
/// comes back is the same type of model with smaller parameters: faster on every device, without a
/// sparse format.
///
/// - [`Shrink::dead`] removes the units that pruning left without weights: nothing reads them, or
///   they are made of nothing, so that they put out one number whatever comes in; what is made of it
///   moves into the bias of the layers that read it, where they have one and pad nothing, and is
///   nothing where the number is zero. The outputs stay as they are, up to the rounding of an addition.
/// - [`Shrink::to`] removes the least important units too, until a share of the multiplications is
///   left: those with the least squares of weights around them, as a fraction of the mean of their
///   group ([DepGraph](https://arxiv.org/abs/2301.12900)). Train the smaller model afterwards.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor, activation::relu};
/// use burn_lean_prune::Shrink;
///
/// let device = Device::flex();
/// let model: Vec<Linear> = [(4, 64), (64, 64), (64, 2)]
///     .map(|(inputs, outputs)| LinearConfig::new(inputs, outputs).init(&device))
///     .to_vec();
/// let forward = |model: &Vec<Linear>, x: Tensor<2>| {
///     let hidden = relu(model[1].forward(relu(model[0].forward(x))));
///     model[2].forward(hidden)
/// };
/// let shrunk = Shrink::to(0.25).shrink(model, forward, Tensor::<2>::ones([8, 4], &device))?;
/// let [inputs, outputs] = shrunk.model[1].weight.dims();
/// assert!(inputs < 64 && outputs < 64);
/// assert_eq!(shrunk.report.removed(), 128 - inputs - outputs);
/// let left = shrunk.report.multiplications_after / shrunk.report.multiplications_before;
/// assert!(left <= 0.25);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// Units stay where the model writes their number down: channels of a depthwise convolution, heads of an
/// attention, channels of Burn's `GroupNorm` and `InstanceNorm`, sizes in a `reshape`, unless
/// [`shrink_resizing`](Self::shrink_resizing) can write another one; and what a norm over features or the
/// output takes whole. Of a convolution with groups of several channels the same ones of all groups go.
/// The [`report`](ShrinkReport) says which stay, and why.
#[derive(Debug, Clone)]
pub struct Shrink {
    /// Share of the multiplications that is left at most, above 0 to 1; `None` removes only what has
    /// no weights.
    pub share: Option<f64>,
    /// Parameters whose units stay. Default: none.
    pub except: Option<ParamGroup>,
}

/// A smaller model.
#[derive(Debug)]
pub struct Shrunk<M> {
    /// The model; parameters that became smaller have new identities. Its record goes into a new model
    /// by [`load_shrunk`](crate::load_shrunk).
    pub model: M,
    /// What was removed, and what could not be.
    pub report: ShrinkReport,
}

impl Shrink {
    /// Removes what pruning left without weights.
    pub fn dead() -> Self {
        Self {
            share: None,
            except: None,
        }
    }

    /// Removes units until `share` of the multiplications is left.
    pub fn to(share: f64) -> Self {
        Self {
            share: Some(share),
            ..Self::dead()
        }
    }

    /// Leaves the units of these parameters alone.
    pub fn except(mut self, group: ParamGroup) -> Self {
        self.except = Some(group);
        self
    }

    /// Shrinks `model`.
    ///
    /// `forward` gives the outputs of a batch of inputs like `batch`, in evaluation mode; it is
    /// recorded. The smaller model's outputs on `batch` are compared with those of the given one
    /// without the units that go. Masks are folded in.
    ///
    /// # Errors
    ///
    /// The model comes back in the error, unchanged.
    /// - [`PruneError::ShrinkNotRecorded`]: the forward pass cannot be recorded; [`PruneError::Graph`]: it is
    ///   recorded and cannot be executed.
    /// - [`PruneError::CannotShrink`]: it does not run with smaller parameters, or another result comes
    ///   out, for a reason that no group of units has alone; the share is not reached without the groups
    ///   whose sizes are written into the model.
    /// - [`PruneError::Panics`]: it panics on the batch.
    /// - [`PruneError::CarriesReparameterization`]: a parameter carries something else than a mask.
    /// - [`PruneError::InvalidConfig`]: also an exception that no parameter with units meets.
    /// - [`PruneError::Device`].
    pub fn shrink<M: Module, I: Tensors, O: Tensors>(
        &self,
        model: M,
        forward: impl Fn(&M, I) -> O,
        batch: I,
    ) -> Result<Shrunk<M>, Rejected<M, PruneError>> {
        let shrunk = self.shrunk(&model, &forward, batch, None);
        returned(model, shrunk)
    }

    /// Shrinks `model` where numbers that are written into it have to follow its parameters.
    ///
    /// As [`shrink`](Self::shrink); `resize` sets those numbers in a model whose parameters have become
    /// smaller: groups of a convolution, heads of an attention of your own (Burn's takes the heads to
    /// fill `d_model`), channels of a norm. With it go channels of depthwise convolutions, whole heads (where
    /// several heads share keys and values, they go together), groups of channels that a norm takes
    /// together. Numbers that `resize` leaves as they are keep their units, as without it.
    ///
    /// ```
    /// use burn::nn::conv::{Conv2d, Conv2dConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_prune::Shrink;
    ///
    /// let device = Device::flex();
    /// // Channels are made, filtered one by one, and put together.
    /// let model: Vec<Conv2d> = [(3, 32, 1), (32, 32, 32), (32, 8, 1)]
    ///     .map(|(i, o, groups)| Conv2dConfig::new([i, o], [3, 3]).with_groups(groups).init(&device))
    ///     .to_vec();
    /// let forward = |model: &Vec<Conv2d>, x| model.iter().fold(x, |x, layer| layer.forward(x));
    /// let images = Tensor::<4>::ones([2, 3, 8, 8], &device);
    /// let shrunk = Shrink::to(0.5).shrink_resizing(model, forward, images, |model| {
    ///     model[1].groups = model[1].weight.dims()[0];
    /// })?;
    /// assert_eq!(shrunk.model[1].groups, shrunk.model[0].weight.dims()[0]);
    /// assert!(shrunk.model[1].groups <= 16);
    /// # Ok::<(), burn_lean_prune::PruneError>(())
    /// ```
    ///
    /// Numbers are in no record: after [`load_shrunk`](crate::load_shrunk) call `resize` on the model.
    ///
    /// # Errors
    ///
    /// As [`shrink`](Self::shrink), and [`PruneError::CannotShrink`] where `resize` panics for the whole
    /// model, or changes its outputs.
    pub fn shrink_resizing<M: Module, I: Tensors, O: Tensors>(
        &self,
        model: M,
        forward: impl Fn(&M, I) -> O,
        batch: I,
        resize: impl Fn(&mut M),
    ) -> Result<Shrunk<M>, Rejected<M, PruneError>> {
        let shrunk = self.shrunk(&model, &forward, batch, Some(&resize));
        returned(model, shrunk)
    }

    fn shrunk<M: Module, I: Tensors, O: Tensors>(
        &self,
        model: &M,
        forward: &impl Fn(&M, I) -> O,
        batch: I,
        resize: Option<&dyn Fn(&mut M)>,
    ) -> Result<Shrunk<M>, PruneError> {
        let share = self.share.unwrap_or(1.0);
        checks::accept(
            share > 0.0 && share <= 1.0,
            "share",
            share,
            "above 0, at most 1",
        )?;
        for carrier in attached(model) {
            if carrier.name != Mask::NAME {
                return Err(PruneError::CarriesReparameterization {
                    path: carrier.path,
                    name: carrier.name,
                });
            }
        }
        // A copy, of running statistics, too.
        let dense = model.valid().materialize();
        let device = dense.devices().into_iter().next();
        let batch = batch.map_tensors(&mut Plain(device.as_ref()));
        let recording = recorded(&dense, forward, &batch)?;
        let outputs = comparable(|| computed(&dense, forward, &batch))?;
        if let Some(resize) = resize {
            let resized = resized(dense.valid(), resize)?;
            let found = computed(&resized, forward, &batch)?;
            agree(&outputs, &found).map_err(|_| PruneError::CannotShrink {
                reason:
                    "`resize` changes the outputs of a model of which nothing is gone: set what \
                         follows from the sizes of parameters alone"
                        .into(),
            })?;
        }
        let mut groups = match resize {
            None => recording.graph().units(),
            Some(_) => recording.graph().units_resized(),
        };
        self.leave_alone(&mut groups)?;
        let weights = Weights::of(&dense, &groups)?;
        let axes = groups.iter().flat_map(|group| &group.axes);
        let used: HashMap<String, f64> = flops::count(
            recording.graph(),
            axes.map(|axis| (axis.path.clone(), 0.0)).collect(),
            1.0,
            recording.graph().constants().map(|(id, _)| id).collect(),
        );
        let readers = Readers::of(&dense, recording, &batch)?;
        let cuts = Cuts {
            dense: &dense,
            forward,
            batch: &batch,
            resize,
            // Units without weights go without a trace.
            silences: self.share.is_some(),
        };
        loop {
            let mut scored = Scored::new(&groups, &weights, &used, resize.is_some());
            scored.remove_dead(&readers);
            if self.share.is_some() {
                scored.remove_until(share)?;
            }
            let gone: Vec<HashSet<usize>> = scored.removed().to_vec();
            let report = ShrinkReport {
                multiplications_before: scored.multiplications_before(),
                multiplications_after: scored.multiplications(),
                groups: (groups.iter().zip(&gone))
                    .map(|(group, removed)| ShrunkGroup::new(group, removed.len()))
                    .collect(),
            };
            let failed = match cuts.cut(&groups, &gone, scored.moved()) {
                Ok(model) => return Ok(Shrunk { model, report }),
                Err(failed @ PruneError::CannotShrink { .. }) => failed,
                Err(other) => return Err(other),
            };
            let written = cuts.written(&groups, &gone)?;
            if written.is_empty() {
                return Err(failed);
            }
            for group in written {
                groups[group].fixed = Some(FixedBy::Written);
            }
        }
    }

    /// Marks what is not to be touched.
    fn leave_alone(&self, groups: &mut [UnitGroup]) -> Result<(), PruneError> {
        let Some(except) = &self.except else {
            return Ok(());
        };
        let mut any = false;
        for group in groups {
            let meets = |id: &ParamId, path: &str| except.matches(id, Some(path));
            if group.axes.iter().any(|axis| meets(&axis.id, &axis.path)) {
                group.fixed.get_or_insert(FixedBy::Excepted);
                any = true;
            }
        }
        checks::accept(any, "except", "nothing", "some parameter with units")
    }
}

/// The smaller model as the given one was, or that one in the error.
fn returned<M: Module>(
    model: M,
    shrunk: Result<Shrunk<M>, PruneError>,
) -> Result<Shrunk<M>, Rejected<M, PruneError>> {
    match shrunk {
        Ok(shrunk) => Ok(Shrunk {
            model: Training::of(&model).restore(shrunk.model),
            ..shrunk
        }),
        Err(error) => Err(Rejected::new(model, error)),
    }
}

/// A model that parts are cut out of.
struct Cuts<'a, M, I, F> {
    dense: &'a M,
    forward: &'a F,
    batch: &'a I,
    /// Sets the numbers that follow the sizes of parameters.
    resize: Option<&'a dyn Fn(&mut M)>,
    /// Whether the units that go have weights.
    silences: bool,
}

impl<M: Module, I: Tensors, O: Tensors, F: Fn(&M, I) -> O> Cuts<'_, M, I, F> {
    /// The model without these units, if its outputs are those of the model whose units nothing reads.
    fn cut(
        &self,
        groups: &[UnitGroup],
        gone: &[HashSet<usize>],
        moved: &HashMap<ParamId, Vec<f32>>,
    ) -> Result<M, PruneError> {
        let forward = self.forward;
        let expected = match self.silences {
            false => computed(self.dense, forward, self.batch)?,
            true => {
                let silent = silence(self.dense.valid(), groups, gone, moved);
                computed(&silent, forward, self.batch)?
            }
        };
        let mut small = cut(self.dense.valid(), groups, gone, moved);
        if let Some(resize) = self.resize {
            small = resized(small, resize)?;
        }
        // Recorded first: a forward pass that does not fit panics.
        let fits = record(&small, self.batch, |small, batch| forward(small, batch));
        fits.map_err(|source| PruneError::CannotShrink {
            reason: format!(
                "the forward pass does not run with smaller parameters, sizes seem to be written into \
                 it ({source}). `Shrink::except` leaves parameters alone"
            ),
        })?;
        let found = computed(&small, forward, self.batch);
        let found = found.map_err(|error| PruneError::CannotShrink {
            reason: format!("with smaller parameters {error}"),
        })?;
        agree(&expected, &found)?;
        Ok(small)
    }

    /// The groups that cannot lose a unit on their own: their number is written into the model.
    fn written(
        &self,
        groups: &[UnitGroup],
        gone: &[HashSet<usize>],
    ) -> Result<Vec<usize>, PruneError> {
        let none = HashMap::new();
        let probing = Cuts {
            silences: true,
            ..*self
        };
        let mut written = Vec::new();
        for (index, units) in gone
            .iter()
            .enumerate()
            .filter(|(_, units)| !units.is_empty())
        {
            // A size that is half of another one, say, still fits where one unit goes, and not where all do.
            let one = units.iter().min().copied().into_iter().collect();
            for probe in [one, units.clone()] {
                let mut alone = vec![HashSet::new(); gone.len()];
                alone[index] = probe;
                match probing.cut(groups, &alone, &none) {
                    Ok(_) => {}
                    Err(PruneError::CannotShrink { .. }) => {
                        written.push(index);
                        break;
                    }
                    Err(other) => return Err(other),
                }
            }
        }
        Ok(written)
    }
}

/// The model after `resize`.
fn resized<M>(mut model: M, resize: &dyn Fn(&mut M)) -> Result<M, PruneError> {
    catch_quietly(|| resize(&mut model)).map_err(|message| PruneError::CannotShrink {
        reason: format!("`resize` panics: {message}"),
    })?;
    Ok(model)
}

fn recorded<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    forward: &impl Fn(&M, I) -> O,
    batch: &I,
) -> Result<Recording<O>, PruneError> {
    let recording = record(model, batch, |model, batch| forward(model, batch));
    recording.map_err(readers::failed)
}

/// What the model gives for the batch; an index out of range panics here, and not in a recording.
fn computed<M, I: Tensors, O>(
    model: &M,
    forward: &impl Fn(&M, I) -> O,
    batch: &I,
) -> Result<O, PruneError> {
    catch_quietly(|| forward(model, cloned(batch))).map_err(PruneError::panics("forward pass"))
}

/// Refuses outputs that say nothing of a smaller model's: NaN is nobody's value, and random numbers are
/// others each time. Returns them.
fn comparable<O: Tensors>(outputs: impl Fn() -> Result<O, PruneError>) -> Result<O, PruneError> {
    let first = outputs()?;
    let outputs_of_it = floats(&first);
    if !outputs_of_it.is_empty()
        && outputs_of_it
            .iter()
            .all(|one| one.shape().num_elements() == 0)
    {
        return Err(PruneError::NoSamples);
    }
    for output in outputs_of_it {
        if read(output)?.iter().any(|value| value.is_nan()) {
            return Err(PruneError::CannotShrink {
                reason: "the outputs of the given model hold NaN for this batch, by which nothing can be \
                         compared: look at the batch and the weights"
                    .into(),
            });
        }
    }
    agree(&first, &outputs()?).map_err(|error| match floats(&first).is_empty() {
        true => error,
        false => PruneError::CannotShrink {
            reason: "two forward passes of the given model differ, so that no smaller one can be compared \
                     with it: the forward pass draws random numbers. Give one that does not, of the mean say"
                .into(),
        },
    })?;
    Ok(first)
}

/// Refuses a smaller model with other outputs.
fn agree<O: Tensors>(expected: &O, found: &O) -> Result<(), PruneError> {
    let (expected, found) = (floats(expected), floats(found));
    if expected.is_empty() {
        return Err(PruneError::CannotShrink {
            reason: "the forward pass has no float output to compare by: return logits, not labels"
                .into(),
        });
    }
    let mut off = match expected.len() == found.len() {
        true => 0.0,
        false => f32::INFINITY,
    };
    for (expected, found) in expected.into_iter().zip(found) {
        let tolerance = tolerance(expected.dtype());
        let (expected, found) = (read(expected)?, read(found)?);
        let here = distance(&expected, &found);
        if here > tolerance {
            off = off.max(here);
        }
    }
    match off == 0.0 {
        true => Ok(()),
        false => Err(PruneError::CannotShrink {
            reason: format!(
                "the smaller model's outputs differ from those of the given one without these units, by \
                 {off} of the largest: the forward pass makes something of their number. \
                 `Shrink::except` leaves parameters alone"
            ),
        }),
    }
}

/// Sums are added up in another order: what they may be off by, of the largest.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        // Some roundings.
        DType::F16 => 8.0 / 1024.0,
        DType::BF16 => 8.0 / 128.0,
        _ => 1e-4,
    }
}

/// The largest distance of two numbers at one place, as a fraction of the largest number that is
/// expected; infinite where only one of them is finite.
fn distance(expected: &[f32], found: &[f32]) -> f32 {
    if expected.len() != found.len() {
        return f32::INFINITY;
    }
    let finite = expected.iter().filter(|x| x.is_finite());
    let largest = finite.fold(0.0_f32, |a, b| a.max(b.abs()));
    let pairs = expected.iter().zip(found);
    pairs.fold(0.0_f32, |most, (x, y)| {
        let off = match x == y || x.is_nan() && y.is_nan() {
            true => 0.0,
            false if !(x.is_finite() && y.is_finite()) => f32::INFINITY,
            false => (x - y).abs() / largest,
        };
        most.max(off)
    })
}

/// All float tensors of an output, flat.
fn floats(output: &impl Tensors) -> Vec<Tensor<1>> {
    struct Floats(Vec<Tensor<1>>);
    impl TensorMapper for Floats {
        fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
            let elements = tensor.shape().num_elements();
            self.0.push(tensor.clone().reshape([elements]));
            tensor.clone()
        }
    }
    let mut floats = Floats(Vec::new());
    let _ = output.map_tensors(&mut floats);
    floats.0
}
