//! Operations that a model carries: recorded as one node, computed when the recording is executed.
//!
//! A fake quantizer observes values, counts steps and keeps its state; on a device that records
//! there are no values. So a module that has such an operation offers it here as a [`Hook`]: while
//! a pass is recorded a stand-in takes its place, and an execution calls the hook of the model that
//! it is given.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::LocalKey;

use burn::backend::DispatchTensor;
use burn::backend::ir::TensorId;
use burn::module::{Flag, Module, ModuleVisitor, Param};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean_reparam::{PathMapper, Trail, map_with_path};

use crate::capture::id;
use crate::{Node, Role};

/// An operation on a tensor that a model carries.
///
/// For modules whose operation needs values: in `visit` the module calls [`offer`] and returns
/// where it is told that the hook was taken; in its forward pass it returns what [`stand_in`]
/// gives, if anything; and while [`is_active`], its copies share its state, and `valid`, `map` and
/// `to_device` leave it as it is.
pub trait Hook: Send + Sync {
    /// What the node is called in a [`Graph`](crate::Graph).
    fn name(&self) -> &'static str;

    /// Where the operation acts in forward passes that do not call it themselves: the role at the
    /// parameter that carries the module, and which of several. `None` where it only acts when it
    /// is called.
    fn role(&self) -> Option<(Role, usize)>;

    /// Whether the model may be used with it: what a record that was loaded says otherwise. Default: it may.
    ///
    /// # Errors
    ///
    /// What is wrong, in a sentence.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// Whether it acts on the zeros that a recurrence starts from, too. Default: no, since they
    /// are on every grid and say nothing of a range.
    fn takes_zeros(&self) -> bool {
        false
    }

    /// Whether the parts of a tensor that a recurrence reads in its steps go through one by one, since what
    /// it makes of a part is another thing than a part of what it makes of the whole. Default: no, the whole goes
    /// through once.
    fn takes_parts(&self) -> bool {
        false
    }

    /// Whether BatchNorms of the model are to use their running statistics in training, too, and leave
    /// them as they are. Default: no.
    fn freezes_batch_norm(&self) -> bool {
        false
    }

    /// Whether a value came by since the last step was taken. Default: no.
    fn has_acted(&self) -> bool {
        false
    }

    /// Told by [`step_taken`], and whether a value came by a hook of the model since the last: if not, it is
    /// no step to count. Returns what the user is to be [warned](warn_of_step) of. Default: nothing.
    fn step_taken(&self, _has_acted: bool) -> Option<&'static str> {
        None
    }

    /// Computes it.
    ///
    /// # Errors
    ///
    /// What is wrong with the tensor, in a sentence; the execution ends with it.
    fn apply(&self, tensor: DispatchTensor, at: &HookedAt<'_>) -> Result<DispatchTensor, String>;
}

/// Where an execution calls a [`Hook`].
#[derive(Debug, Clone)]
pub struct HookedAt<'a> {
    /// The node of the hook in the graph.
    pub node: Node<'a>,
    /// The device of the model: with autodiff in training.
    pub device: Device,
}

/// A hook, and where the model carries it.
#[derive(Clone)]
pub(crate) struct Carried {
    key: usize,
    /// Path of the module that offered it.
    pub(crate) path: String,
    /// Path of the parameter whose reparameterization it is part of.
    pub(crate) parameter: Option<String>,
    pub(crate) hook: Arc<dyn Hook>,
}

/// What is going on on this thread.
enum Task {
    /// A model is walked for its hooks.
    Collect {
        path: Vec<String>,
        /// Length of the path of the parameter whose reparameterization is being walked.
        parameter: Option<usize>,
        found: Vec<Carried>,
    },
    /// A forward pass runs on a capture device.
    Record {
        carried: Vec<Carried>,
        noted: Noted,
        device: Device,
    },
    /// A model is copied or changed.
    Share,
}

/// What modules said of tensors while a forward pass was recorded.
#[derive(Debug, Default)]
pub(crate) struct Noted {
    /// Tensors that stand for what a hook makes, and its position.
    pub(crate) stand_ins: Vec<(TensorId, usize)>,
    /// Tensors that stand for what a cast makes, and its dtype.
    pub(crate) casts: Vec<(TensorId, FloatDType)>,
    /// The first tensors before and after what is to run in full precision.
    pub(crate) full: Vec<(TensorId, TensorId)>,
    /// Tensors that stand for others without their gradients.
    pub(crate) stopped: Vec<TensorId>,
}

thread_local! {
    static PASS: Cell<Option<u64>> = const { Cell::new(None) };
    /// Whether casts are noted instead of recorded.
    static NOTES_CASTS: Cell<bool> = const { Cell::new(false) };
    /// Whether stops are noted in recordings of an evaluation, too.
    static KEEPS_STOPS: Cell<bool> = const { Cell::new(false) };
    /// Whether BatchNorms train by their own flags alone.
    static UNFROZEN: Cell<bool> = const { Cell::new(false) };
    static TASK: RefCell<Option<Task>> = const { RefCell::new(None) };
}

/// Whether a model is being recorded or executed on this thread: copies of modules with hooks
/// share their state meanwhile.
pub fn is_active() -> bool {
    TASK.with_borrow(Option::is_some)
}

/// A forward pass with values: what a hook is given until this is dropped belongs together. Within
/// another pass on this thread it is part of that.
///
/// An execution is one by itself; a module that calls its hooks again and again, as a recurrence does,
/// says so for passes that are not recorded.
#[derive(Debug)]
#[must_use]
pub struct ForwardPass {
    before: Option<u64>,
}

impl ForwardPass {
    /// From here on; inside of another one, a part of that.
    pub fn begin() -> Self {
        match PASS.get() {
            None => Self::alone(),
            before => Self { before },
        }
    }

    /// From here on one by itself: a thread of rayon's that waits in an execution may take on another.
    pub(crate) fn alone() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        let before = PASS.replace(Some(COUNT.fetch_add(1, Ordering::Relaxed)));
        Self { before }
    }

    /// A number of the one on this thread, which no other has.
    pub fn current() -> Option<u64> {
        PASS.get()
    }
}

impl Drop for ForwardPass {
    fn drop(&mut self) {
        PASS.set(self.before);
    }
}

/// Whether a model has hooks that act in forward passes which do not call them: without a recording
/// they are passed by.
pub fn acts_in_recordings<M: Module>(model: &M) -> bool {
    offered(model).iter().any(|one| one.hook.role().is_some())
}

/// Tells all hooks of a model that an optimizer has taken a step, and whether a value came by
/// [one of them](Hook::has_acted) since the last: for the second optimizer of a model none did. What they say to
/// it is a warning.
pub fn step_taken<M: Module>(model: &M) {
    let carried = offered(model);
    let has_acted = carried.iter().any(|one| one.hook.has_acted());
    let said = carried.into_iter().filter_map(|one| {
        let message = one.hook.step_taken(has_acted)?;
        Some((message, one.path))
    });
    warn_of_step(said);
}

/// Gives one warning for each message, with all the paths that it is for.
pub fn warn_of_step(said: impl IntoIterator<Item = (&'static str, String)>) {
    let mut paths: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
    for (message, path) in said {
        paths.entry(message).or_default().push(format!("`{path}`"));
    }
    for (message, paths) in paths {
        tracing::warn!("{}: {message}", paths.join(", "));
    }
}

/// Whether a model may be used with all of its hooks.
///
/// # Errors
///
/// The path of the first that says otherwise, and what it says.
pub fn check<M: Module>(model: &M) -> Result<(), (String, String)> {
    let mut carried = offered(model).into_iter();
    carried.try_for_each(|one| one.hook.check().map_err(|reason| (one.path, reason)))
}

/// Offers a hook to whoever walks the model; returns whether it was taken, so that the module's
/// state is not to be visited.
///
/// `key` is the identity of the module's state: the address of what its copies share.
pub fn offer(key: usize, hook: impl FnOnce() -> Arc<dyn Hook>) -> bool {
    let collects = TASK.with_borrow(|task| matches!(task, Some(Task::Collect { .. })));
    if !collects {
        return is_active();
    }
    let hook = hook();
    TASK.with_borrow_mut(|task| {
        if let Some(Task::Collect {
            path,
            parameter,
            found,
        }) = task
        {
            found.push(Carried {
                key,
                path: path.join("."),
                parameter: parameter.map(|len| path[..len].join(".")),
                hook,
            });
        }
    });
    true
}

/// While a forward pass is recorded: a tensor that stands for what the hook with this identity
/// makes of `x`. `None` outside of a recording, and for a hook that the recorded model did not
/// offer.
pub fn stand_in<const D: usize>(x: &Tensor<D>, key: usize) -> Option<Tensor<D>> {
    stand_in_of(x, key, |x| x.add_scalar(0.0))
}

/// As [`stand_in`], for a hook whose result has another dtype than `x`.
pub fn stand_in_as<const D: usize>(
    x: &Tensor<D>,
    key: usize,
    dtype: FloatDType,
) -> Option<Tensor<D>> {
    stand_in_of(x, key, |x| match x.dtype() == dtype.into() {
        true => x.add_scalar(0.0),
        false => x.cast(dtype),
    })
}

/// Whether a forward pass runs on a capture device on this thread.
pub(crate) fn is_recording() -> bool {
    TASK.with_borrow(|task| matches!(task, Some(Task::Record { .. })))
}

/// Adds to what is said of tensors in a recording.
fn note(write: impl FnOnce(&mut Noted)) {
    TASK.with_borrow_mut(|task| {
        if let Some(Task::Record { noted, .. }) = task {
            write(noted);
        }
    });
}

/// `record` is any operation that is recorded and gives the output an id of its own.
fn stand_in_of<const D: usize>(
    x: &Tensor<D>,
    key: usize,
    record: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Option<Tensor<D>> {
    let position = TASK.with_borrow(|task| match task {
        Some(Task::Record { carried, .. }) => carried.iter().position(|one| one.key == key),
        _ => None,
    })?;
    let output = record(x.clone());
    let of_output = id(&output.clone().into_dispatch())?;
    note(|noted| noted.stand_ins.push((of_output, position)));
    Some(output)
}

/// Runs `record`, which records forward passes, so that [`note_cast`] notes casts instead of leaving
/// them to be recorded.
///
/// For a look at what dtypes come to where Burn would refuse to record: all tensors keep one dtype,
/// and [`Node::noted_cast`](crate::Node::noted_cast) says where a cast would be.
pub fn noting_casts<T>(record: impl FnOnce() -> T) -> T {
    with_flag(&NOTES_CASTS, record)
}

/// Runs `record`, which records forward passes in evaluation mode that are executed with gradients: what
/// [`stop_gradient`] stops is stopped there, too.
pub fn keeping_stops<T>(record: impl FnOnce() -> T) -> T {
    with_flag(&KEEPS_STOPS, record)
}

/// Sets a flag of this thread meanwhile.
fn with_flag<T>(flag: &'static LocalKey<Cell<bool>>, run: impl FnOnce() -> T) -> T {
    struct Restore(&'static LocalKey<Cell<bool>>, bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _restore = Restore(flag, flag.replace(true));
    run()
}

/// In a recording that [notes casts](noting_casts): a tensor that stands for `x` cast to `dtype`, in
/// the dtype that `x` has. `None` elsewhere.
pub fn note_cast<const D: usize>(x: &Tensor<D>, dtype: FloatDType) -> Option<Tensor<D>> {
    if !(is_recording() && NOTES_CASTS.get()) {
        return None;
    }
    let output = x.clone().add_scalar(0.0);
    let of_output = id(&output.clone().into_dispatch())?;
    note(|noted| noted.casts.push((of_output, dtype)));
    Some(output)
}

/// `x` without gradients: [`Tensor::detach`], which a recording shows.
///
/// In the place of `detach` in forward passes that are recorded, as those of `Autocast::run` and
/// `QuantizedForward::run` are: of a teacher's outputs, of the target of a bootstrap, of the rounding that a
/// straight-through estimator adds. Elsewhere it is `detach`, on a thread that a forward pass starts, too, which
/// no recording knows of.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_graph::hooks::stop_gradient;
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<1>::from_floats([3.0], &device).require_grad();
/// // Of x · x, of which one factor is a constant, the derivative is x.
/// let grads = (x.clone() * stop_gradient(x.clone())).sum().backward();
/// let gradient = x.grad(&grads).unwrap();
/// assert_eq!(gradient.into_data().try_to_vec::<f32>().unwrap(), [3.0]);
/// ```
pub fn stop_gradient<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if !is_recording() || !(x.device().is_autodiff() || KEEPS_STOPS.get()) {
        return x.detach();
    }
    let output = x.detach().add_scalar(0.0);
    if let Some(of_output) = id(&output.clone().into_dispatch()) {
        note(|noted| noted.stopped.push(of_output));
    }
    output
}

/// Runs a part of a forward pass, and notes in a recording that its operations are to run in F32, whatever
/// rules say: [`Node::is_full`](crate::Node::is_full).
pub fn in_full_precision<T>(body: impl FnOnce() -> T) -> T {
    // Tensors are numbered in their order.
    let mark = || {
        let device = TASK.with_borrow(|task| match task {
            Some(Task::Record { device, .. }) => Some(device.clone()),
            _ => None,
        })?;
        id(&Tensor::<1>::zeros([1], &device).into_dispatch())
    };
    let before = mark();
    let result = body();
    if let (Some(before), Some(after)) = (before, mark()) {
        note(|noted| noted.full.push((before, after)));
    }
    result
}

/// The hooks that a model offers, in its order.
pub(crate) fn offered<M: Module>(model: &M) -> Vec<Carried> {
    let scope = Scope::enter(Task::Collect {
        path: Vec::new(),
        parameter: None,
        found: Vec::new(),
    });
    model.visit(&mut Hooks);
    match scope.leave() {
        Some(Task::Collect { found, .. }) => found,
        _ => Vec::new(),
    }
}

/// Follows a walk for hooks, and looks at nothing else.
struct Hooks;

impl ModuleVisitor for Hooks {
    fn enter_module(&mut self, name: &str, container: &str) {
        TASK.with_borrow_mut(|task| {
            if let Some(Task::Collect {
                path, parameter, ..
            }) = task
            {
                if container == "Reparameterization" && parameter.is_none() {
                    *parameter = Some(path.len());
                }
                path.push(name.to_string());
            }
        });
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        TASK.with_borrow_mut(|task| {
            if let Some(Task::Collect {
                path, parameter, ..
            }) = task
            {
                path.pop();
                if *parameter == Some(path.len()) {
                    *parameter = None;
                }
            }
        });
    }
}

/// Runs a forward pass whose hooks are these; and what modules said of tensors.
pub(crate) fn recording<T>(
    carried: Vec<Carried>,
    device: &Device,
    run: impl FnOnce() -> T,
) -> (T, Noted) {
    let scope = Scope::enter(Task::Record {
        carried,
        noted: Noted::default(),
        device: device.clone(),
    });
    let result = run();
    match scope.leave() {
        Some(Task::Record { noted, .. }) => (result, noted),
        _ => (result, Noted::default()),
    }
}

/// Copies or changes a model whose modules with hooks share their state meanwhile.
pub fn sharing<T>(work: impl FnOnce() -> T) -> T {
    let _scope = Scope::enter(Task::Share);
    work()
}

/// A copy of the model with frozen BatchNorms, which shares its statistics and hooks, where one of these
/// [asks for it](Hook::freezes_batch_norm).
///
/// Burn records no flags: of a model that was loaded, its hooks alone know.
pub fn frozen<M: Module>(model: &M) -> Option<M> {
    if UNFROZEN.get() {
        return None;
    }
    let mut carried = offered(model).into_iter();
    let asks = carried.any(|one| one.hook.freezes_batch_norm());
    asks.then(|| sharing(|| freeze_batch_norm(model.clone())))
}

/// Runs `work` while BatchNorms train by their own flags, whatever the hooks of a model ask for: to measure
/// their statistics anew.
pub fn without_freezing<T>(work: impl FnOnce() -> T) -> T {
    with_flag(&UNFROZEN, work)
}

/// The model with the training flags of its BatchNorms off.
pub fn freeze_batch_norm<M: Module>(model: M) -> M {
    map_with_path(model, &mut FreezeBatchNorm)
}

struct FreezeBatchNorm;

impl PathMapper for FreezeBatchNorm {
    fn flag(&mut self, at: &Trail, flag: Param<Flag>) -> Param<Flag> {
        match at.container() {
            "Struct:BatchNorm" => flag.with_value(false),
            _ => flag,
        }
    }
}

/// Ends the task when it is dropped, also by a panic of the model's.
struct Scope {
    outer: Option<Task>,
}

impl Scope {
    fn enter(task: Task) -> Self {
        Self {
            outer: TASK.replace(Some(task)),
        }
    }

    fn leave(self) -> Option<Task> {
        TASK.take()
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        TASK.set(self.outer.take());
    }
}

impl std::fmt::Debug for Carried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.hook.name(), self.path)
    }
}
