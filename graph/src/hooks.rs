//! Operations that a model carries: recorded as one node, computed when the recording is executed.
//!
//! A fake quantizer observes values, counts steps and keeps its state; on a device that records
//! there are no values. So a module that has such an operation offers it here as a [`Hook`]: while
//! a pass is recorded a stand-in takes its place, and an execution calls the hook of the model that
//! it is given.

use std::cell::RefCell;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::backend::ir::TensorId;
use burn::tensor::{Device, Tensor};

use crate::record::capture::id;
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

    /// Whether it acts on the zeros that a recurrence starts from, too. Default: no, since they
    /// are on every grid and say nothing of a range.
    fn takes_zeros(&self) -> bool {
        false
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
        /// Tensors that stand for what a hook makes, and its position.
        stand_ins: Vec<(TensorId, usize)>,
    },
    /// A model is copied or changed.
    Share,
}

thread_local! {
    static TASK: RefCell<Option<Task>> = const { RefCell::new(None) };
}

/// Whether a model is being recorded or executed on this thread: copies of modules with hooks
/// share their state meanwhile.
pub fn is_active() -> bool {
    TASK.with_borrow(Option::is_some)
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
    let position = TASK.with_borrow(|task| match task {
        Some(Task::Record { carried, .. }) => carried.iter().position(|one| one.key == key),
        _ => None,
    })?;
    // Any operation that is recorded and keeps the numbers gives the output an id of its own.
    let output = x.clone().add_scalar(0.0);
    let of_output = id(&output.clone().into_dispatch())?;
    TASK.with_borrow_mut(|task| {
        if let Some(Task::Record { stand_ins, .. }) = task {
            stand_ins.push((of_output, position));
        }
    });
    Some(output)
}

/// Follows a walk for hooks into a module.
pub(crate) fn entered(name: &str, container_type: &str) {
    TASK.with_borrow_mut(|task| {
        if let Some(Task::Collect {
            path, parameter, ..
        }) = task
        {
            if container_type == "Reparameterization" && parameter.is_none() {
                *parameter = Some(path.len());
            }
            path.push(name.to_string());
        }
    });
}

/// Follows it out of one.
pub(crate) fn exited() {
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

/// The hooks that a model offers while `walk` visits it, in its order.
pub(crate) fn collecting<T>(walk: impl FnOnce() -> T) -> (T, Vec<Carried>) {
    let scope = Scope::enter(Task::Collect {
        path: Vec::new(),
        parameter: None,
        found: Vec::new(),
    });
    let walked = walk();
    match scope.leave() {
        Some(Task::Collect { found, .. }) => (walked, found),
        _ => (walked, Vec::new()),
    }
}

/// Runs a forward pass whose hooks are these; and which tensors stand for what they make.
pub(crate) fn recording<T>(
    carried: Vec<Carried>,
    run: impl FnOnce() -> T,
) -> (T, Vec<(TensorId, usize)>) {
    let scope = Scope::enter(Task::Record {
        carried,
        stand_ins: Vec::new(),
    });
    let result = run();
    match scope.leave() {
        Some(Task::Record { stand_ins, .. }) => (result, stand_ins),
        _ => (result, Vec::new()),
    }
}

/// Copies or changes a model whose modules with hooks share their state meanwhile.
pub fn sharing<T>(work: impl FnOnce() -> T) -> T {
    let _scope = Scope::enter(Task::Share);
    work()
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
