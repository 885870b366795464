//! The autocast region: where weights are worth their half-precision copies.

use std::cell::Cell;
use std::sync::Arc;

use burn::tensor::{FloatDType, Tensor};
use burn_lean_graph::hooks::in_full_precision;
use burn_lean_graph::{Recordings, TensorMapper, Tensors};

use crate::Fallback;
use crate::autocast::lists::Lists;
use crate::autocast::run::Resolved;
use crate::autocast::weight_cast::Cache;
use crate::device::compute::{Compute, cast_to};

thread_local! {
    /// The region this thread is in. A spawned thread starts outside, as with PyTorch.
    static REGION: Cell<Option<Compute>> = const { Cell::new(None) };
}

/// The region this thread is in.
pub(crate) fn current() -> Option<Compute> {
    REGION.get()
}

/// A value that the model made itself, as the autocast region this thread is in needs it; unchanged
/// outside of one, and in [`full_precision`].
///
/// Tensors that a forward pass makes (a position, a mask, a constant) have the dtype of the device,
/// and do not mix with half precision.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_lean_amp::{AutocastConfig, to_region};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(4, 2).init(&device);
/// let (model, autocast) = AutocastConfig::new(FloatDType::F16).prepare(model)?;
/// let y = autocast.forward(Tensor::<2>::ones([3, 4], &device), |x| {
///     let offset = to_region(Tensor::<2>::full([1, 2], 0.5, &x.device()));
///     model.forward(x) + offset
/// });
/// assert_eq!(y.dims(), [3, 2]);
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
pub fn to_region<T: Tensors>(value: T) -> T {
    match current() {
        Some(compute) => value.map_tensors(&mut Caster(Edge::In(compute))),
        None => value,
    }
}

/// Restores the surrounding region, also when the forward pass panics.
pub(crate) struct Entered {
    previous: Option<Compute>,
    /// The casts of weights, in the outermost region with casts.
    _cache: Option<Cache>,
}

impl Entered {
    pub(crate) fn enter(compute: Option<Compute>) -> Self {
        Self {
            previous: REGION.replace(compute),
            _cache: compute.and_then(|_| Cache::open()),
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        REGION.set(self.previous);
    }
}

/// Mixed precision for forward passes: [`run`](Self::run) for any model, operation by operation;
/// [`forward`](Self::forward) as a region for a [prepared](crate::AutocastConfig::prepare) model.
///
/// Clones share what [`run`](Self::run) remembers between steps.
#[derive(Debug, Clone)]
pub struct Autocast {
    pub(crate) compute: Compute,
    /// What [`run`](Self::run) asks each device for; `None` computes so on all of them, in an audit.
    pub(crate) requested: Option<FloatDType>,
    pub(crate) fallback: Fallback,
    pub(crate) lists: Arc<Lists>,
    pub(crate) devices: Arc<Resolved>,
    pub(crate) recordings: Recordings,
}

impl Autocast {
    /// For whatever device, which is not looked at.
    fn everywhere(compute: Compute) -> Self {
        Self {
            compute,
            requested: None,
            ..Self::unresolved(compute.dtype)
        }
    }

    /// For devices that are not known yet.
    pub(crate) fn unresolved(dtype: FloatDType) -> Self {
        Self {
            compute: Compute::native(dtype),
            requested: Some(dtype),
            fallback: Fallback::Error,
            lists: Arc::default(),
            devices: Arc::default(),
            recordings: Recordings::default(),
        }
    }

    /// Runs `forward` in half precision: casts the input, switches the casts of the weights on,
    /// and casts the output.
    ///
    /// `input` and the result are tensors, or anything made of them ([`Tensors`]); integer
    /// and boolean tensors pass unchanged, as do F64 tensors. Compute the loss outside, in F32.
    /// The region is of this thread only: a thread that `forward` spawns is outside of it. Inside
    /// of another region the output has the dtype of that one. Do not enter regions in tasks of `rayon`
    /// that run at the same time on one pool: a thread that waits in one, in a kernel of a CPU backend say,
    /// takes up another task, which then runs in its region. [`run`](Self::run) keeps nothing of the
    /// thread while it computes.
    ///
    /// A weight that is trained is cast once in a region, however often it is used there; the copies
    /// live until the outermost region ends. The gradients of all uses are summed in F32. A weight
    /// with another reparameterization before the cast is computed, and cast, for each use. Within one use
    /// they are summed as Burn does it in half: those of a row that an `Embedding`, `select` or `gather`
    /// takes many times one by one, which in BF16 ends at 256 times one of them and in F16 at 2,048. Call
    /// such a module in [`full_precision`], or use [`run`](Self::run); [`audit`](crate::audit()) names it.
    ///
    /// # Panics
    ///
    /// When the input is on a device that cannot compute in the dtype, which
    /// [`prepare`](crate::AutocastConfig::prepare) has refused for the devices of the model.
    pub fn forward<I: Tensors, O: Tensors>(&self, input: I, forward: impl FnOnce(I) -> O) -> O {
        let surrounding = current();
        let input = input.map_tensors(&mut Caster(Edge::In(self.compute)));
        let output = {
            let _region = Entered::enter(Some(self.compute));
            forward(input)
        };
        output.map_tensors(&mut Caster(match surrounding {
            Some(outer) => Edge::Between(self.compute, outer),
            None => Edge::Out(self.compute),
        }))
    }

    /// The same region without any cast.
    pub(crate) fn in_full_precision(&self) -> Self {
        Self::everywhere(Compute::native(FloatDType::F32))
    }

    /// The same region on a device that has the dtype.
    pub(crate) fn native(&self) -> Self {
        Self::everywhere(Compute::native(self.compute.dtype))
    }

    /// The dtype that the forward pass computes in (or emulates).
    pub fn dtype(&self) -> FloatDType {
        self.compute.dtype
    }

    /// Whether the dtype is emulated with rounded F32 tensors.
    pub fn is_emulated(&self) -> bool {
        self.compute.emulated
    }
}

/// Runs `body` in F32 inside an autocast region, and casts its result back; in [`Autocast::run`], its operations.
///
/// For what must not run in half: modules that Burn cannot run in it (BatchNorm, recurrent cells,
/// positional encodings), or a sum that would overflow. `input` arrives in F32, weights are the
/// FP32 master weights, the result is cast to the dtype of the region. Outside of a region `body`
/// just runs, so a model that contains this call is unchanged without autocast; likewise on a thread that the forward
/// pass starts, of which neither a region nor a recording knows.
///
/// ```
/// use burn::nn::{BatchNormConfig, LinearConfig};
/// use burn::tensor::{DType, Device, FloatDType, Tensor};
/// use burn_lean_amp::{AutocastConfig, full_precision};
///
/// let device = Device::flex();
/// let linear = LinearConfig::new(4, 2).init(&device);
/// let norm = BatchNormConfig::new(2).init(&device);
/// let (model, autocast) = AutocastConfig::new(FloatDType::BF16).prepare((linear, norm))?;
///
/// let y = autocast.forward(Tensor::<2>::ones([3, 4], &device), |x| {
///     let h = model.0.forward(x);
///     let h = full_precision(h.unsqueeze_dim::<3>(2), |h| {
///         assert_eq!(h.dtype(), DType::F32);
///         model.1.forward(h)
///     });
///     assert_eq!(h.dtype(), DType::BF16);
///     h
/// });
/// assert_eq!(y.dims(), [3, 2, 1]);
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
pub fn full_precision<I: Tensors, O: Tensors>(input: I, body: impl FnOnce(I) -> O) -> O {
    let Some(compute) = current() else {
        return in_full_precision(|| body(input));
    };
    let input = input.map_tensors(&mut Caster(Edge::Out(compute)));
    let output = {
        let _region = Entered::enter(None);
        body(input)
    };
    output.map_tensors(&mut Caster(Edge::In(compute)))
}

/// The cast at the edge of a region.
#[derive(Debug, Clone, Copy)]
struct Caster(Edge);

#[derive(Debug, Clone, Copy)]
enum Edge {
    /// Into a region.
    In(Compute),
    /// Out of a region, to F32.
    Out(Compute),
    /// Out of a region into the one around it.
    Between(Compute, Compute),
}

impl TensorMapper for Caster {
    /// Casts one tensor of any rank; the cast is tracked by autodiff.
    fn float<const D: usize>(&mut self, x: &Tensor<D>) -> Tensor<D> {
        let x = x.clone();
        match self.0 {
            Edge::In(compute) => {
                compute.assert_supported(&x.device());
                compute.cast(x)
            }
            Edge::Out(compute) if compute.emulated => {
                // What leaves a half region is half, and so is the gradient that enters it.
                cast_to(compute.cast(x), FloatDType::F32)
            }
            Edge::Out(_) => cast_to(x, FloatDType::F32),
            Edge::Between(inner, outer) if inner.emulated && inner != outer => {
                outer.cast(inner.cast(x))
            }
            Edge::Between(_, outer) => outer.cast(x),
        }
    }
}
