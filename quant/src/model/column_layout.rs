//! Quantized weights whose records hold them in another layout: those of a `Linear` in
//! [`LinearLayout::Col`](burn::nn::LinearLayout), which are recorded transposed.
//!
//! Burn transposes them on the way into a record and back by mappers of the parameter, which know
//! nothing of quantized tensors. That they load at all is [`burn_lean_reparam::column_layout`]'s.

use burn::module::Param;
use burn::tensor::{DType, Tensor};
use burn_lean_reparam::column_layout::{loadable, transposes};

use crate::codes::stored::code_scheme;
use crate::{Granularity, QuantizedTensor, Scheme};

/// The weight, with mappers that transpose it also when it is quantized with this scheme, if it has
/// mappers that transpose it at all. It loads from a record.
pub(crate) fn quantizable<const D: usize>(
    param: Param<Tensor<D>>,
    scheme: &Scheme,
) -> Param<Tensor<D>> {
    if !transposes(&param) {
        return param;
    }
    let (_, _, mapper) = param.clone().consume();
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
        .and_then(|weight| weight.to_burn::<D>(&device));
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
