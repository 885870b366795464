//! Weights whose records hold them in another layout: those of a `Linear` in
//! [`LinearLayout::Col`](burn::nn::LinearLayout), which are recorded transposed.
//!
//! Burn transposes them on the way into a record and back by mappers of the parameter, which know
//! nothing of quantized tensors; and it checks the shape of what is loaded against the shape that the
//! weight was initialized with, which it forgets once the weight was used.

use burn::module::{Module, ModuleMapper, Param, ParamMapper};
use burn::tensor::{DType, Device, Shape, Tensor};

use crate::codes::stored::code_scheme;
use crate::{Granularity, QuantizedTensor, Scheme, Storage};

/// The weight, with mappers that transpose it also when it is quantized with this scheme, if it has
/// mappers that transpose it at all. It loads from a record.
pub(crate) fn quantizable<const D: usize>(
    param: Param<Tensor<D>>,
    scheme: &Scheme,
) -> Param<Tensor<D>> {
    let (_, _, mapper) = param.clone().consume();
    if !transposes(&mapper, &param.lazy_device()) {
        return param;
    }
    let (save, load) = (mapper.clone(), mapper);
    let (held, recorded) = (scheme.clone(), transposed_scheme(scheme));
    loadable(
        param
            .save_mapper(move |weight| of_any_kind(weight, &held, |weight| save.on_save(weight)))
            .load_mapper(move |weight| {
                of_any_kind(weight, &recorded, |weight| load.on_load(weight))
            }),
    )
}

/// The model, ready to load a record: Burn sees the shapes of recorded weights.
pub(crate) fn ready_to_load<M: Module>(model: M) -> M {
    struct Ready;
    impl ModuleMapper for Ready {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            loadable(param)
        }
    }
    model.map(&mut Ready)
}

/// The parameter as if its value had not been used yet, if a record holds it transposed.
fn loadable<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    if D != 2 {
        return param;
    }
    let device = param.lazy_device();
    let (id, value, mapper) = param.clone().consume();
    if !transposes(&mapper, &device) {
        return param;
    }
    let mut recorded = value.shape().to_vec();
    recorded.reverse();
    let requires_grad = value.is_require_grad();
    let (save, load) = (mapper.clone(), mapper);
    Param::uninitialized(
        id,
        move |device, requires_grad| {
            let value = match value.device() == *device {
                true => value,
                false => value.to_device(device).detach(),
            };
            match requires_grad {
                true => value.set_require_grad(true),
                false => value,
            }
        },
        device,
        requires_grad,
        Shape::from(recorded),
    )
    .save_mapper(move |weight| save.on_save(weight))
    .load_mapper(move |weight| load.on_load(weight))
}

/// Whether records hold the weight transposed.
fn transposes<const D: usize>(mapper: &ParamMapper<Tensor<D>>, device: &Device) -> bool {
    if D != 2 {
        return false;
    }
    let row = Tensor::<D>::zeros(Shape::from(vec![1, 2]), &device.clone().inner());
    mapper.on_save(row).shape().to_vec() == [2, 1]
}

/// A float weight as `of_float` maps it; a quantized one of this scheme transposed code by code.
fn of_any_kind<const D: usize>(
    weight: Tensor<D>,
    scheme: &Scheme,
    of_float: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    if !matches!(weight.dtype(), DType::QFloat(_)) {
        return of_float(weight);
    }
    let device = weight.device();
    let of_codes = code_scheme(scheme);
    let scheme = match weight.dtype() {
        DType::QFloat(stored) if stored.block_size().is_none() => &of_codes,
        _ => scheme,
    };
    let transposed = QuantizedTensor::from_burn(weight.clone(), scheme)
        .and_then(|weight| weight.transposed(transposed_scheme(scheme)))
        .and_then(|weight| weight.to_burn::<D>(&device, Storage::Auto));
    // What the device cannot hold in the other layout has the same values as floats.
    transposed.unwrap_or_else(|_| of_float(weight.dequantize()))
}

fn transposed_scheme(scheme: &Scheme) -> Scheme {
    let granularity = match &scheme.granularity {
        Granularity::PerChannel { axis } => Granularity::PerChannel { axis: 1 - axis },
        Granularity::PerBlock { extents } => Granularity::PerBlock {
            extents: extents.iter().rev().copied().collect(),
        },
        other => other.clone(),
    };
    scheme.clone().with_granularity(granularity)
}
