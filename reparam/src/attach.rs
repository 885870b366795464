//! Attaching a reparameterization, with the check that Burn leaves out.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterizer};
use burn::tensor::Tensor;

use crate::Rejected;

/// Why [`attach`] refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The parameter already carries a reparameterization, and Burn can hold only one.
    #[error(
        "parameter `{path}` already carries the reparameterization `{existing}`; attach both \
         together with `Chain`, or fold the first in with `Module::materialize`"
    )]
    AlreadyAttached {
        /// Path of the parameter, for example `encoder.0.weight`.
        path: String,
        /// [`NAME`](burn::module::Reparameterization::NAME) of what it carries.
        existing: String,
    },
    /// The model has no floating-point parameter at all.
    #[error(
        "the model has no floating-point parameter to attach to; check that its modules derive \
         `Module` and that no field holding parameters is marked `#[module(skip)]`"
    )]
    NoParameters,
    /// The reparameterizer chose none of the model's parameters.
    #[error(
        "the reparameterizer chose none of the model's {parameters} floating-point parameters, of which \
         the first is `{first}`: nothing would change; one made for a model (masks, for one) knows that \
         model's parameters alone, and one that selects paths must name some of these"
    )]
    NothingChosen {
        /// How many there are.
        parameters: usize,
        /// Path of the first.
        first: String,
    },
}

/// One parameter that carries a reparameterization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// Path of the parameter, for example `encoder.0.weight`.
    pub path: String,
    /// Identity of the parameter (its base).
    pub id: ParamId,
    /// [`NAME`](burn::module::Reparameterization::NAME) of the reparameterization.
    pub name: String,
}

/// Lists the parameters of `model` that carry a reparameterization, in module order.
pub fn attached<M: Module>(model: &M) -> Vec<Attached> {
    let mut finder = AttachedFinder::default();
    model.visit(&mut finder);
    finder.attached
}

/// The first of these that `model` carries no longer: Burn's `Param::map`, called by itself, takes off what
/// its parameter carries.
pub fn lost<M: Module>(before: &[Attached], model: &M) -> Option<Attached> {
    let now = match before {
        [] => return None,
        _ => attached(model),
    };
    let is_there = |one: &Attached| now.iter().any(|now| now.path == one.path);
    before.iter().find(|one| !is_there(one)).cloned()
}

/// Attaches a reparameterization to every parameter that `reparameterizer` chooses.
///
/// Same as [`Module::apply_reparameterization`], except that a parameter which already carries
/// one is an error instead of a silent loss. Parameters that already carry one and that
/// `reparameterizer` leaves alone are fine. Parameters *inside* a reparameterization (the factors
/// of a LoRA adapter, say) are not offered to `reparameterizer`.
///
/// # Errors
///
/// [`AttachError::AlreadyAttached`] with the path of the first such parameter,
/// [`AttachError::NoParameters`] when the model has none, [`AttachError::NothingChosen`] when
/// `reparameterizer` leaves all of them alone. The model comes back in the error.
pub fn attach<M: Module, R: Reparameterizer>(
    model: M,
    reparameterizer: R,
) -> Result<M, Rejected<M, AttachError>> {
    attach_to(model, reparameterizer, false)
}

/// As [`attach`], where it is no mistake to choose nothing: the model comes back as it was.
///
/// # Errors
///
/// [`AttachError::AlreadyAttached`], [`AttachError::NoParameters`], with the model.
pub fn attach_if_any<M: Module, R: Reparameterizer>(
    model: M,
    reparameterizer: R,
) -> Result<M, Rejected<M, AttachError>> {
    attach_to(model, reparameterizer, true)
}

fn attach_to<M: Module, R: Reparameterizer>(
    model: M,
    reparameterizer: R,
    may_be_none: bool,
) -> Result<M, Rejected<M, AttachError>> {
    let mut finder = AttachedFinder::default();
    model.visit(&mut finder);
    if finder.float_parameters == 0 {
        return Err(Rejected::new(model, AttachError::NoParameters));
    }
    let (mut conflict, mut chosen) = (None, 0);
    let checked = Checked {
        inner: reparameterizer,
        existing: finder
            .attached
            .into_iter()
            .map(|attached| (attached.path, attached.name))
            .collect(),
        nested: finder.nested,
        conflict: &mut conflict,
        chosen: &mut chosen,
    };
    // Modules are handles: the clone copies no tensor, and is what the error gives back.
    let attached = model.clone().apply_reparameterization(checked);
    if chosen == 0 && !may_be_none && conflict.is_none() {
        conflict = Some(AttachError::NothingChosen {
            parameters: finder.float_parameters,
            first: finder.first,
        });
    }
    match conflict {
        None => Ok(attached),
        Some(error) => Err(Rejected::new(model, error)),
    }
}

/// Runs the reparameterizer, but never on a parameter that would lose what it carries.
struct Checked<'a, R> {
    inner: R,
    /// By path: copies in one model have the same identities.
    existing: HashMap<String, String>,
    nested: HashSet<ParamId>,
    conflict: &'a mut Option<AttachError>,
    chosen: &'a mut usize,
}

impl<R: Reparameterizer> Reparameterizer for Checked<'_, R> {
    type Reparam = R::Reparam;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<R::Reparam>) {
        if self.conflict.is_some() || self.nested.contains(&param.id) {
            return (param, None);
        }
        let (base, reparameterization) = self.inner.reparameterize(path, param);
        if reparameterization.is_some()
            && let Some(existing) = self.existing.get(path)
        {
            *self.conflict = Some(AttachError::AlreadyAttached {
                path: path.to_string(),
                existing: existing.clone(),
            });
            return (base, None);
        }
        *self.chosen += usize::from(reparameterization.is_some());
        (base, reparameterization)
    }
}

/// Burn visits the base, then enters a "module" of container type `Reparameterization`.
#[derive(Default)]
struct AttachedFinder {
    path: Vec<String>,
    depth: usize,
    last: Option<(String, ParamId)>,
    float_parameters: usize,
    first: String,
    attached: Vec<Attached>,
    nested: HashSet<ParamId>,
}

impl ModuleVisitor for AttachedFinder {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == "Reparameterization" {
            if self.depth == 0
                && let Some((path, id)) = self.last.take()
            {
                self.attached.push(Attached {
                    path,
                    id,
                    name: name.to_string(),
                });
            }
            self.depth += 1;
        }
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        if container_type == "Reparameterization" {
            self.depth -= 1;
        }
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.depth > 0 {
            self.nested.insert(param.id);
        } else {
            let path = self.path.join(".");
            if self.float_parameters == 0 {
                self.first.clone_from(&path);
            }
            self.float_parameters += 1;
            self.last = Some((path, param.id));
        }
    }
}
