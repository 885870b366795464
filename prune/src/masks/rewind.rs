//! Back to an earlier record, with the zeros of now.

use burn::module::Module;
use burn::store::ModuleRecord;
use burn_lean_reparam::column_layout::ready_to_load;
use burn_lean_reparam::{Rejected, Training};

use crate::{Masks, PruneError};

/// Resets the weights that a masked model has kept to what they are in `record`, and holds the
/// zeros: the rewinding of [The Lottery Ticket Hypothesis, Frankle & Carbin,
/// 2019](https://arxiv.org/abs/1803.03635).
///
/// `record` is one of this model from before its masks, or with any masks of its own, which do
/// not matter. Everything else that it holds (biases, norms, running statistics) is loaded, too.
/// Train with a new optimizer afterwards.
///
/// ```
/// use burn::module::{Module, Param};
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_lean_prune::{Layout, LayerKind, Masks, rewind};
///
/// let device = Device::flex();
/// let mut linear = LinearConfig::new(2, 2).with_bias(false).init(&device);
/// linear.weight = Param::from_data([[1.0, 2.0], [3.0, 4.0]], &device);
/// let early = linear.clone().into_record();
/// linear.weight = linear.weight.map(|weight| weight * 5.0);
///
/// let mut layout = Layout::new();
/// layout.push("weight", [2, 2], LayerKind::Linear, 2.0);
/// let linear = Masks::from_support(&layout, &[1, 2])?.attach(linear)?;
/// let linear = rewind(linear, early)?;
/// let weight = linear.weight.val().into_data();
/// assert_eq!(weight.iter::<f32>().collect::<Vec<_>>(), [0.0, 2.0, 3.0, 0.0]);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// # Errors
///
/// The model comes back in the error, unchanged.
/// - [`PruneError::NoMasks`]: the model carries no mask.
/// - [`PruneError::Record`]: the record is not one of this model.
pub fn rewind<M: Module>(model: M, record: ModuleRecord) -> Result<M, Rejected<M, PruneError>> {
    let masks = match Masks::of(&model) {
        Ok(masks) if masks.is_empty() => {
            return Err(Rejected::new(model, PruneError::NoMasks));
        }
        Ok(masks) => masks,
        Err(error) => return Err(Rejected::new(model, error)),
    };
    // Tried on copies: Burn loads running statistics in place, also when the record is refused.
    let load = |copy: M, record: &ModuleRecord| ready_to_load(copy).try_load_record(record.clone());
    let record = match load(model.valid(), &record) {
        Ok(_) => record,
        Err(masked) => match load(model.valid().materialize(), &record) {
            Ok(_) => record.allow_partial(true),
            Err(plain) => {
                let error = PruneError::Record {
                    what: "the record to rewind to".into(),
                    reason: format!(
                        "it fits neither the model without masks ({plain}) nor with masks \
                         ({masked})"
                    ),
                };
                return Err(Rejected::new(model, error));
            }
        },
    };
    // Into a copy: clones share running statistics, which a record replaces in place.
    match load(model.valid(), &record) {
        Ok(loaded) => masks.replace(Training::of(&model).restore(loaded)),
        Err(error) => {
            let error = PruneError::Record {
                what: "the record to rewind to".into(),
                reason: error.to_string(),
            };
            Err(Rejected::new(model, error))
        }
    }
}
