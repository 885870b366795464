//! Which parameters compute in half precision, and why others do not.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_lean_graph::{GraphError, record};
use burn_lean_reparam::{PathVisitor, Trail, each_float, visit_with_path};
use serde::{Deserialize, Serialize};

use crate::AmpError;
use crate::autocast::region::Entered;
use crate::device::compute::Compute;

/// Why a parameter of a prepared model stays in F32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum KeptBecause {
    /// It belongs to a BatchNorm, whose running statistics are F32 and do not mix with half.
    BatchNorm,
    /// It belongs to a recurrent cell, whose initial state is F32 and does not mix with half.
    Recurrent,
    /// [`AutocastConfig::full_precision`](crate::AutocastConfig::full_precision) names it.
    Requested,
    /// It was not prepared, or is neither F32 nor half.
    NotPrepared,
}

/// How one parameter takes part in autocast.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParameterPrecision {
    /// Path of the parameter.
    pub path: String,
    /// Elements.
    pub elements: usize,
    /// `None` if the parameter is cast in a region; otherwise why it stays in F32.
    pub kept: Option<KeptBecause>,
}

/// Says for every floating-point parameter of a prepared model whether it is cast.
///
/// The factors of an adapter are listed too, as not prepared: they compute in F32, and their
/// product is cast with the weight. Computes nothing, and copies no weight.
///
/// # Errors
///
/// [`AmpError::EffectiveWeights`] where what reparameterizations make of the weights cannot be recorded.
pub fn parameter_precision<M: Module>(model: &M) -> Result<Vec<ParameterPrecision>, AmpError> {
    let cast = cast_parameters(model)?;
    let kept = KeptParameters::of(model, None);
    let parameters = kept
        .all
        .into_iter()
        .map(|mut parameter| {
            if cast.contains(&parameter.path) {
                parameter.kept = None;
            } else if parameter.kept.is_none() {
                parameter.kept = Some(KeptBecause::NotPrepared);
            }
            parameter
        })
        .collect();
    Ok(parameters)
}

/// The paths of the parameters whose effective value is half inside of a region.
///
/// What a chain of reparameterizations holds is not visible from outside; what comes out of it is.
/// In a recording asking for it computes nothing.
fn cast_parameters<M: Module>(model: &M) -> Result<HashSet<String>, AmpError> {
    let mut cast = HashSet::new();
    let recorded = record(&model.valid(), &(), |model, ()| {
        let _region = Entered::enter(Some(Compute::native(FloatDType::F16)));
        each_float(&model.clone().materialize(), |at, float| {
            if float.dtype() == DType::F16 {
                cast.insert(at.path());
            }
        });
    });
    match recorded {
        Ok(_) | Err(GraphError::NoDevice) => Ok(cast),
        Err(error) => Err(AmpError::EffectiveWeights(error)),
    }
}

/// Which structs of a model, by path, are Burn's own.
///
/// A visitor learns the name of a struct and those of its fields, and a model may have a struct of
/// the same name: it is Burn's if it has the fields, too.
#[derive(Default)]
pub(crate) struct BurnStructs {
    path: Vec<String>,
    /// Struct and fields by path.
    fields: HashMap<String, (String, Vec<String>)>,
}

impl BurnStructs {
    const BATCH_NORM: [&str; 4] = ["gamma", "beta", "running_mean", "running_var"];
    /// All of Burn's recurrent cells keep their weights in gate controllers.
    const GATE_CONTROLLER: [&str; 2] = ["input_transform", "hidden_transform"];

    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut found = Self::default();
        model.visit(&mut found);
        found
    }

    pub(crate) fn is_batch_norm(&self, path: &str) -> bool {
        self.reason(path) == Some(KeptBecause::BatchNorm)
    }

    /// Why the parameters inside of the struct at `path` stay in F32.
    fn reason(&self, path: &str) -> Option<KeptBecause> {
        let (name, fields) = self.fields.get(path)?;
        let has = |wanted: &[&str]| {
            let mut wanted = wanted.iter();
            wanted.all(|wanted| fields.iter().any(|field| field == wanted))
        };
        match name.as_str() {
            "Struct:BatchNorm" if has(&Self::BATCH_NORM) => Some(KeptBecause::BatchNorm),
            "Struct:GateController" if has(&Self::GATE_CONTROLLER) => Some(KeptBecause::Recurrent),
            _ => None,
        }
    }
}

impl ModuleVisitor for BurnStructs {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        let container = (container_type.to_string(), Vec::new());
        let (_, fields) = self.fields.entry(self.path.join(".")).or_insert(container);
        fields.push(name.to_string());
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

/// Finds what stays in F32 by the modules that surround a parameter.
pub(crate) struct KeptParameters {
    requested: Option<ParamGroup>,
    /// Whether that names a parameter.
    is_found: bool,
    structs: BurnStructs,
    all: Vec<ParameterPrecision>,
    /// By path: a copy of a network, a teacher say, has the same identities.
    pub(crate) kept: HashMap<String, KeptBecause>,
    /// The parameters that are in half precision themselves.
    halves: Vec<(String, DType)>,
}

impl KeptParameters {
    pub(crate) fn of<M: Module>(model: &M, requested: Option<ParamGroup>) -> Self {
        let mut kept = Self {
            requested,
            is_found: false,
            structs: BurnStructs::of(model),
            all: Vec::new(),
            kept: HashMap::new(),
            halves: Vec::new(),
        };
        visit_with_path(model, &mut kept);
        kept
    }

    /// Refuses a group that names no parameter: a misspelt path would be computed in half.
    pub(crate) fn refuse_unknown(&self) -> Result<(), AmpError> {
        match &self.requested {
            Some(group) if !self.is_found => Err(AmpError::InvalidConfig {
                field: "full_precision",
                value: format!("{group:?}"),
                expected: "a group that a floating-point parameter of the model is in",
            }),
            _ => Ok(()),
        }
    }

    /// Refuses parameters that are in half precision themselves, but for those in `allowed`.
    pub(crate) fn refuse_halves(&self, allowed: Option<DType>) -> Result<(), AmpError> {
        let mut halves = self.halves.iter();
        match halves.find(|(_, dtype)| Some(*dtype) != allowed) {
            Some((path, dtype)) => Err(AmpError::ParameterDtype {
                path: path.clone(),
                dtype: *dtype,
            }),
            None => Ok(()),
        }
    }

    fn reason(&self, at: &Trail, is_requested: bool) -> Option<KeptBecause> {
        let names = at.names();
        let mut surrounding = (0..names.len()).map(|depth| names[..depth].join("."));
        let reason = surrounding.find_map(|path| self.structs.reason(&path));
        reason.or(is_requested.then_some(KeptBecause::Requested))
    }
}

impl PathVisitor for KeptParameters {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        let path = at.path();
        let dtype = param.base().dtype();
        let requested = self.requested.as_ref();
        let is_requested = requested.is_some_and(|group| group.matches(&param.id, Some(&path)));
        self.is_found |= is_requested;
        let mut reason = self.reason(at, is_requested);
        match dtype {
            DType::F32 => {}
            DType::F16 | DType::BF16 | DType::Flex32 => self.halves.push((path.clone(), dtype)),
            _ => reason = reason.or(Some(KeptBecause::NotPrepared)),
        }
        if let Some(reason) = reason {
            self.kept.insert(path.clone(), reason);
        }
        self.all.push(ParameterPrecision {
            path,
            elements: param.lazy_shape().num_elements(),
            kept: reason,
        });
    }
}
