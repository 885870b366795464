//! One tensor in all copies of a parameter.

use std::collections::{HashMap, HashSet};

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

/// `model` with one tensor in all copies of a parameter that trains: its gradient is that of all of them,
/// and what an optimizer gave the first one alone, the others have, too.
///
/// Burn's optimizers step the first copy of a parameter that several modules hold, and leave the others as
/// they are: call it before the first step, and after each. Under Burn's Learner, which takes copies apart when it
/// puts a model on a device, `Amp` and `AfterStep` do. Copies of a frozen parameter stay as they are.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_reparam::join_copies;
///
/// let device = Device::flex().autodiff();
/// let layer = LinearConfig::new(2, 2).with_bias(false).init(&device);
/// let mut model = join_copies(vec![layer.clone(), layer]);
/// let x = Tensor::<2>::ones([1, 2], &device);
/// let loss = model[1].forward(model[0].forward(x)).sum();
/// let grads = GradientsParams::from_grads(loss.backward(), &model);
/// model = join_copies(SgdConfig::new().init().step(0.1, model, grads));
/// let [first, second] = [0, 1].map(|at: usize| model[at].weight.val().into_data());
/// assert_eq!(first, second);
/// ```
pub fn join_copies<M: Module>(model: M) -> M {
    model.map(&mut Join::default())
}

/// The tensors of parameters that were met.
#[derive(Default)]
struct Join(HashMap<ParamId, DispatchTensor>);

impl ModuleMapper for Join {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        match self.0.get(&param.id) {
            Some(first) => param.map(|_| Tensor::from_dispatch(first.clone())),
            None => {
                self.0.insert(param.id, param.base().into_dispatch());
                param
            }
        }
    }
}

/// Whether a parameter that trains is in several places of `model`: whether [`join_copies`] has something
/// to join.
pub fn has_copies<M: Module>(model: &M) -> bool {
    let mut copies = Copies::default();
    model.visit(&mut copies);
    copies.found
}

/// The parameters that were met, and whether one of them was met again.
#[derive(Default)]
struct Copies {
    met: HashSet<ParamId>,
    found: bool,
}

impl ModuleVisitor for Copies {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.found |= !self.met.insert(param.id);
        }
    }
}
