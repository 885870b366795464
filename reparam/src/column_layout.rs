//! Weights whose records hold them transposed: those of a `Linear` in
//! [`LinearLayout::Col`](burn::nn::LinearLayout), which are `[inputs, outputs]` in memory and
//! `[outputs, inputs]` in records.
//!
//! Burn checks the shape of what is loaded against the shape that the weight was initialized with, which is
//! the recorded one, and which it forgets once the weight was used; from then on it compares the shape in
//! memory, and refuses the model's own record. So does it with what [`Module::valid`] returns, which uses every
//! weight.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Shape, Tensor};

/// The model, ready to load a record: Burn sees the shapes of recorded weights. Its values stay, for what is
/// in no record.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{LinearConfig, LinearLayout};
/// use burn::tensor::Device;
/// use burn_lean_reparam::column_layout::ready_to_load;
///
/// let config = LinearConfig::new(4, 2).with_layout(LinearLayout::Col);
/// let layer = config.init(&Device::flex());
/// let weight = layer.weight.val().into_data();
/// let record = layer.clone().into_record();
/// // Burn alone compares the shape of the record, `[2, 4]`, with `[4, 2]`.
/// assert!(layer.clone().try_load_record(record.clone()).is_err());
///
/// let loaded = ready_to_load(layer).try_load_record(record)?;
/// loaded.weight.val().into_data().assert_eq(&weight, true);
/// # Ok::<(), burn::store::RecordError>(())
/// ```
pub fn ready_to_load<M: Module>(model: M) -> M {
    struct Ready;
    impl ModuleMapper for Ready {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            loadable(param)
        }
    }
    model.map(&mut Ready)
}

/// The parameter as if its value had not been used yet, if a record holds it transposed.
///
/// [`ready_to_load`] does this to all of a model.
pub fn loadable<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    if !transposes(&param) {
        return param;
    }
    let device = param.lazy_device();
    let (id, value, mapper) = param.consume();
    // A parameter without autodiff tells whether it is to be trained only where it is.
    let like = Param::from_mapped_value(id, row(&device), mapper.clone());
    let trains = like.train().is_require_grad();
    let tracked = value.is_require_grad();
    let mut recorded = value.shape().to_vec();
    recorded.reverse();
    let (save, load) = (mapper.clone(), mapper);
    Param::uninitialized(
        id,
        move |device, requires_grad| {
            let value = match value.device() == *device {
                true => value,
                false => value.to_device(device).detach(),
            };
            // As it was, unless it was frozen or unfrozen since.
            let tracked = match requires_grad == (trains && device.is_autodiff()) {
                true => tracked,
                false => requires_grad,
            };
            match value.is_require_grad() == tracked {
                true => value,
                false => value.set_require_grad(tracked),
            }
        },
        device,
        trains,
        Shape::from(recorded),
    )
    .save_mapper(move |weight| save.on_save(weight))
    .load_mapper(move |weight| load.on_load(weight))
}

/// Whether records hold the parameter transposed.
pub fn transposes<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    if D != 2 {
        return false;
    }
    let (_, _, mapper) = param.clone().consume();
    let recorded = mapper.on_save(row(&param.lazy_device()));
    recorded.shape().to_vec() == [2, 1]
}

/// A matrix that shows what a mapper does.
fn row<const D: usize>(device: &Device) -> Tensor<D> {
    Tensor::zeros(Shape::from(vec![1, 2]), &device.clone().inner())
}

#[cfg(test)]
mod tests {
    use burn::nn::{LinearConfig, LinearLayout};

    use super::*;

    #[test]
    fn what_trains_does_so_after_an_evaluation_and_what_is_frozen_does_not() {
        let device = Device::flex().autodiff();
        let config = LinearConfig::new(4, 2).with_layout(LinearLayout::Col);
        for trains in [true, false] {
            let layer = match trains {
                true => config.init(&device),
                false => config.init(&device).freeze(),
            };
            let record = layer.clone().into_record();
            let ready = || ready_to_load(layer.valid());
            assert_eq!(ready().train().weight.is_require_grad(), trains);
            let loaded = ready().try_load_record(record.clone()).unwrap();
            assert!(!loaded.weight.is_autodiff());
            assert_eq!(loaded.weight.dims(), [4, 2]);
            assert_eq!(loaded.train().weight.is_require_grad(), trains);
            let loaded = ready_to_load(layer).try_load_record(record).unwrap();
            assert_eq!(loaded.weight.is_require_grad(), trains);
        }
    }

    #[test]
    fn what_is_not_loaded_stays_as_it_is() {
        let device = Device::flex().autodiff();
        let config = LinearConfig::new(4, 2).with_layout(LinearLayout::Col);
        let layer = config.init(&device);
        let weight = layer.weight.val().into_data();
        let ready = ready_to_load(layer);
        assert!(ready.weight.is_require_grad());
        ready.weight.val().into_data().assert_eq(&weight, true);
        assert!(!ready_to_load(ready).freeze().weight.is_require_grad());
    }
}
