//! Finding and replacing the quantizers of a model, wherever they are.
//!
//! Burn's visitors and mappers see parameters, not the modules that hold them, and what a weight
//! carries is hidden behind a private trait object. So the quantizer takes part: while one of the
//! walks here is under way on this thread, [`FakeQuantize`] reports itself from its own `visit`,
//! or replaces itself in its own `map`.

use std::cell::RefCell;
use std::collections::HashMap;

use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param};

use crate::{FakeQuantize, Scheme};

/// Where a quantizer sits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum Site {
    /// The weight that carries it.
    Weight,
    /// The input of the layer whose weight carries it.
    Input,
    /// The output of the layer whose weight carries it.
    Output,
    /// The attention weights, after the softmax, of the attention whose query weight carries it.
    Attention,
    /// An operation without a weight, after the layer whose weight carries it.
    Operation,
    /// A module of the model's own.
    Standalone,
}

impl Site {
    /// Its name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::Input => "input",
            Self::Output => "output",
            Self::Attention => "attention",
            Self::Operation => "operation",
            Self::Standalone => "standalone",
        }
    }
}

/// A quantizer and its place in the model.
#[derive(Debug, Clone)]
pub struct Located {
    /// Path of the quantizer, for example `fc1.weight.quant.input`.
    pub path: String,
    /// Path of the parameter that carries it, for example `fc1.weight`; `None` if it stands alone.
    pub parameter: Option<String>,
    /// What it quantizes.
    pub site: Site,
    /// The quantizer; a copy.
    pub quantizer: FakeQuantize,
}

impl Located {
    /// The name to report: the parameter's path with the site, or the path.
    pub fn name(&self) -> String {
        let site = match self.site {
            Site::Weight => return self.parameter.clone().unwrap_or_default(),
            Site::Input => "input",
            Site::Output => "output",
            Site::Attention => "attention",
            Site::Operation => {
                let role = self.quantizer.role();
                role.map_or("operation", |(role, _)| role.name())
            }
            Site::Standalone => return self.path.clone(),
        };
        let parameter = self.parameter.as_deref().unwrap_or_default();
        let layer = parameter.strip_suffix(".weight").unwrap_or(parameter);
        format!("{site} of `{layer}`")
    }
}

/// The quantizers of a model, in module order; copies, so that nothing that is done to them
/// reaches the model. See [`map_quantizers`].
pub fn quantizers<M: Module>(model: &M) -> Vec<Located> {
    let scope = Scope::enter(Task::Find(Vec::new()));
    model.visit(&mut Follow);
    match scope.leave() {
        Task::Find(found) => found,
        _ => Vec::new(),
    }
}

/// The schemes of the weights that a model quantizes, by their paths.
pub(crate) fn weight_schemes<M: Module>(model: &M) -> HashMap<String, Scheme> {
    quantizers(model)
        .into_iter()
        .filter(|located| located.site == Site::Weight && located.quantizer.is_enabled())
        .filter_map(|located| Some((located.parameter?, located.quantizer.scheme().clone())))
        .collect()
}

/// The quantizers of a model themselves: what is done to them reaches the model.
pub(crate) fn own_quantizers<M: Module>(model: &M) -> Vec<FakeQuantize> {
    let scope = Scope::enter(Task::Own(Vec::new()));
    model.visit(&mut Follow);
    match scope.leave() {
        Task::Own(found) => found,
        _ => Vec::new(),
    }
}

/// The model with each of its quantizers replaced by what `map` makes of it.
///
/// Costs no computation on the device.
pub fn map_quantizers<M: Module>(model: M, mut map: impl FnMut(Located) -> FakeQuantize) -> M {
    let replacements = quantizers(&model)
        .into_iter()
        .map(|located| (located.path.clone(), map(located)))
        .collect();
    replace(model, replacements)
}

/// The model with the quantizers at some paths replaced.
pub(crate) fn replace<M: Module>(model: M, replacements: HashMap<String, FakeQuantize>) -> M {
    let _scope = Scope::enter(Task::Replace(replacements));
    model.map(&mut Follow)
}

/// Runs `work` while quantizers keep their state from visitors and mappers, so that to them the
/// model is the float model.
pub(crate) fn hide<T>(work: impl FnOnce() -> T) -> T {
    let _scope = Scope::enter(Task::Hide);
    work()
}

/// Whether a quantizer is not to be seen.
pub(crate) fn is_hidden() -> bool {
    WALK.with_borrow(|walk| {
        matches!(
            walk,
            Some(Walk {
                task: Task::Hide,
                ..
            })
        )
    })
}

enum Task {
    Find(Vec<Located>),
    Own(Vec<FakeQuantize>),
    Replace(HashMap<String, FakeQuantize>),
    Hide,
}

struct Walk {
    path: Vec<String>,
    /// Length of the path of the parameter whose reparameterization is being walked.
    parameter: Option<usize>,
    task: Task,
}

thread_local! {
    static WALK: RefCell<Option<Walk>> = const { RefCell::new(None) };
}

/// Called by a quantizer that is visited.
pub(crate) fn visited(quantizer: &FakeQuantize) {
    WALK.with_borrow_mut(|walk| {
        let Some(walk) = walk else { return };
        let found = match &mut walk.task {
            Task::Find(found) => found,
            Task::Own(found) => return found.push(quantizer.handle()),
            Task::Replace(_) | Task::Hide => return,
        };
        let parameter = walk.parameter.map(|len| walk.path[..len].join("."));
        let site = match (&parameter, walk.path.last().map(String::as_str)) {
            (Some(_), Some("weight")) => Site::Weight,
            (Some(_), Some("input")) => Site::Input,
            (Some(_), Some("output")) => Site::Output,
            (Some(_), Some("attention")) => Site::Attention,
            (Some(_), Some(_)) if quantizer.role().is_some() => Site::Operation,
            _ => Site::Standalone,
        };
        found.push(Located {
            path: walk.path.join("."),
            parameter,
            site,
            quantizer: quantizer.clone(),
        });
    });
}

/// Called by a quantizer that is mapped: what takes its place.
pub(crate) fn replacement() -> Option<FakeQuantize> {
    WALK.with_borrow_mut(|walk| {
        let walk = walk.as_mut()?;
        match &mut walk.task {
            Task::Replace(replacements) => replacements.remove(&walk.path.join(".")),
            _ => None,
        }
    })
}

/// Ends the walk when it is dropped, also by a panic of the model's.
struct Scope {
    outer: Option<Walk>,
}

impl Scope {
    fn enter(task: Task) -> Self {
        let walk = Walk {
            path: Vec::new(),
            parameter: None,
            task,
        };
        Self {
            outer: WALK.replace(Some(walk)),
        }
    }

    fn leave(self) -> Task {
        let walk = WALK.take();
        walk.map_or(Task::Find(Vec::new()), |walk| walk.task)
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        WALK.set(self.outer.take());
    }
}

/// Tracks the path.
struct Follow;

fn entered(name: &str, container_type: &str) {
    WALK.with_borrow_mut(|walk| {
        let Some(walk) = walk else { return };
        if container_type == "Reparameterization" && walk.parameter.is_none() {
            walk.parameter = Some(walk.path.len());
        }
        walk.path.push(name.to_string());
    });
}

fn exited() {
    WALK.with_borrow_mut(|walk| {
        let Some(walk) = walk else { return };
        walk.path.pop();
        if walk.parameter == Some(walk.path.len()) {
            walk.parameter = None;
        }
    });
}

impl ModuleVisitor for Follow {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        entered(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        exited();
    }
}

impl ModuleMapper for Follow {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        entered(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        exited();
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        flag
    }
}
