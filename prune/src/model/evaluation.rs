//! A model in evaluation mode that still has gradients, and the mean loss on held-out examples.

use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;
use burn_lean_reparam::{catch_quietly, evaluated_with_gradients};

use crate::host::read;
use crate::model::checks::check_number;
use crate::{Batch, PruneError, Selection};

/// `model` with gradients for the prunable parameters alone, and otherwise as it is deployed: dropout
/// off, BatchNorm on its running statistics.
///
/// Burn decides on training behaviour by the device *and* by a flag of the layer; the flags are
/// what `freeze` clears. Running statistics are copied by `valid`, so the caller's model is not
/// touched.
pub(crate) fn gradient_model<M: Module>(model: &M, selection: &Selection) -> M {
    let trained = selection.ids().iter().copied().collect();
    evaluated_with_gradients(model).map(&mut GradientsOf { trained })
}

struct GradientsOf {
    trained: HashSet<ParamId>,
}

impl ModuleMapper for GradientsOf {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let trained = self.trained.contains(&param.id);
        param.set_require_grad(trained)
    }
}

/// Mean loss of the deployed model over all examples of `batches`.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::mean_loss;
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(1, 1).with_bias(false).init(&device);
/// let batches = [Tensor::<2>::ones([3, 1], &device), Tensor::<2>::ones([1, 1], &device)];
/// let loss = mean_loss(&model, |_, x: &Tensor<2>| x.clone().sum(), &batches)?;
/// // (3 examples · loss 3 + 1 example · loss 1) / 4
/// assert_eq!(loss, 2.5);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// # Errors
///
/// [`PruneError::NoSamples`] without examples, [`PruneError::Mismatch`] where the parts of a batch
/// have other numbers of them, [`PruneError::Loss`] where the loss is not one number,
/// [`PruneError::Panics`], [`PruneError::Device`] where reading fails.
pub fn mean_loss<M: Module, B: Batch>(
    model: &M,
    loss: impl Fn(&M, &B) -> Tensor<1>,
    batches: &[B],
) -> Result<f64, PruneError> {
    let model = model.valid();
    let device = model
        .devices()
        .into_iter()
        .next()
        .map(|device| device.inner());
    let (mut sum, mut examples) = (0.0, 0);
    for batch in batches {
        batch.check()?;
        let count = batch.examples();
        if count == 0 {
            // Its mean is no number.
            continue;
        }
        let batch = match &device {
            Some(device) => batch.clone().to_device(device),
            None => batch.clone(),
        };
        let value = catch_quietly(|| loss(&model, &batch)).map_err(PruneError::panics("loss"))?;
        check_number(&value)?;
        let value = read(value.without_autodiff())?;
        sum += count as f64 * f64::from(value.first().copied().unwrap_or(f32::NAN));
        examples += count;
    }
    match examples {
        0 => Err(PruneError::NoSamples),
        _ => Ok(sum / examples as f64),
    }
}
