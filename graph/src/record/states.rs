//! What a forward pass leaves in the running states of a model.
//!
//! Burn shows no [`RunningState`](burn::module::RunningState) as one: a visitor gets a parameter, and
//! the value that it had before the last update. Two things tell more. Copies of a model share its
//! running states and nothing else, so that a copy made before parameters become placeholders shows a
//! placeholder there alone. And Burn takes an update in where a model goes from training to
//! evaluation or back.

use burn::backend::ir::TensorId;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use burn_lean_reparam::catch_quietly;
use rustc_hash::FxHashMap as HashMap;

use crate::capture::{as_autodiff, id};
use crate::{GraphError, Parameter, hooks};

/// The running states of a model whose forward pass is being recorded.
pub(super) struct States<M> {
    /// A copy without placeholders that shares them.
    model: M,
    /// For each float tensor that a visitor sees, which placeholder it is, if it is a running state.
    places: Vec<Option<usize>>,
    trains: bool,
}

impl<M: Module> States<M> {
    /// Those of a model that became one with these placeholders; `before` is a copy of it that was
    /// made before.
    pub(super) fn of(before: M, found: &[Parameter], trains: bool) -> Option<Self> {
        let shown = Floats::of(&before);
        if shown.iter().all(Option::is_none) {
            return None;
        }
        let index: HashMap<TensorId, usize> = found
            .iter()
            .enumerate()
            .map(|(index, parameter)| (parameter.tensor, index))
            .collect();
        let place = |id: Option<TensorId>| index.get(&id?).copied();
        Some(Self {
            model: before,
            places: shown.into_iter().map(place).collect(),
            trains,
        })
    }

    /// Notes which parameters are running states, and what the forward pass has left in them.
    pub(super) fn note(self, found: &mut [Parameter]) -> Result<(), GraphError> {
        let Self {
            model,
            places,
            trains,
        } = self;
        for index in places.iter().flatten() {
            found[*index].running = true;
        }
        let taken_in = catch_quietly(|| {
            hooks::sharing(|| {
                // `valid` does not know the capture device with autodiff, which `train` leaves alone.
                let model = match trains {
                    true => model.map(&mut OnAutodiff).train(),
                    false => model.valid(),
                };
                Floats::of(&model)
            })
        });
        let shown = taken_in.map_err(|reason| {
            let paths = places.iter().flatten();
            let paths: Vec<&str> = paths.map(|index| found[*index].path.as_str()).collect();
            GraphError::RunningState {
                path: paths.join("`, `"),
                reason,
            }
        })?;
        for (id, place) in shown.into_iter().zip(places) {
            let Some(index) = place else { continue };
            let parameter = &mut found[index];
            match id {
                Some(id) if id == parameter.tensor => {}
                Some(id) => parameter.update = Some(id),
                None => {
                    return Err(GraphError::RunningState {
                        path: parameter.path.clone(),
                        reason: "its new value is not on the device that records".into(),
                    });
                }
            }
        }
        Ok(())
    }
}

/// The float tensors of a model, in its order: those on a capture device by their names in the
/// recording.
#[derive(Default)]
struct Floats(Vec<Option<TensorId>>);

impl Floats {
    fn of<M: Module>(model: &M) -> Vec<Option<TensorId>> {
        let mut floats = Self::default();
        model.visit(&mut floats);
        floats.0
    }
}

impl ModuleVisitor for Floats {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(id(&param.base().into_dispatch()));
    }
}

/// Makes all tensors such that `train` changes none on the capture device, and registers nothing with
/// autodiff for the others.
struct OnAutodiff;

impl ModuleMapper for OnAutodiff {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = param.base().into_dispatch();
        match id(&value) {
            Some(_) => Param::initialized(param.id, Tensor::from_dispatch(as_autodiff(value))),
            None => param.set_require_grad(false),
        }
    }
}
