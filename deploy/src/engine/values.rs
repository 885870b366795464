//! Burn's tensors as the engine's values, and back.

use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, get_device_settings};
use burn::tensor::{DType, Element, TensorData};
use burn_lean_graph::{TensorMapper, Tensors, host};
use rten::Value;
use rten_tensor::{Tensor, prelude::*};

use crate::{DeployError, ElementType, ValueInfo};

/// Inputs as the engine takes them.
pub(crate) struct Given {
    pub(crate) values: Vec<Value>,
    /// Of the first of them.
    pub(crate) device: DispatchDevice,
}

/// Reads the tensors of a value to the host.
pub(crate) fn given<I: Tensors>(inputs: &I) -> Result<Given, DeployError> {
    let mut reader = Reader::default();
    let _ = inputs.map_tensors(&mut reader);
    if let Some(reason) = reader.error {
        return Err(DeployError::Run { reason });
    }
    let device = reader
        .device
        .ok_or(DeployError::Graph(burn_lean_graph::GraphError::NoDevice))?;
    Ok(Given {
        values: reader.values,
        device,
    })
}

#[derive(Default)]
struct Reader {
    values: Vec<Value>,
    device: Option<DispatchDevice>,
    error: Option<String>,
}

impl Reader {
    fn push(&mut self, data: Result<TensorData, impl std::fmt::Display>) {
        let value = data.map_err(|error| error.to_string()).and_then(to_value);
        match value {
            Ok(value) => self.values.push(value),
            Err(error) => self.error = Some(error),
        }
    }
}

impl TensorMapper for Reader {
    burn_lean_graph::every_kind!(|self, tensor| {
        let inner = tensor.clone().without_autodiff();
        self.device
            .get_or_insert(inner.device().as_dispatch().clone());
        self.push(inner.try_into_data());
        tensor.clone()
    });
}

/// A tensor of any dtype and rank, read to the host.
pub(crate) fn read(tensor: DispatchTensor) -> Result<Value, DeployError> {
    let value = host(tensor)
        .map_err(|error| error.to_string())
        .and_then(to_value);
    value.map_err(|reason| DeployError::Run { reason })
}

/// As a recording is computed: F32, and I32 for all integers and bools.
pub(crate) fn to_value(data: TensorData) -> Result<Value, String> {
    let shape = data.shape().to_vec();
    let dtype = data.dtype();
    if dtype == DType::F32 {
        let values = data.try_to_vec::<f32>();
        shaped(shape, values.map_err(|error| format!("{error:?}"))?)
    } else if dtype.is_bool() {
        shaped(shape, data.iter::<bool>().map(i32::from).collect())
    } else if dtype.is_float() {
        Err(format!("the engine computes in F32, not in {dtype:?}"))
    } else {
        let values: Option<Vec<i32>> = match dtype {
            DType::U64 => data.iter::<u64>().map(|x| i32::try_from(x).ok()).collect(),
            _ => data.iter::<i64>().map(|x| i32::try_from(x).ok()).collect(),
        };
        shaped(
            shape,
            values.ok_or("an integer of the input does not fit I32")?,
        )
    }
}

pub(crate) fn shaped<T>(shape: Vec<usize>, values: Vec<T>) -> Result<Value, String>
where
    Value: From<Tensor<T>>,
{
    Value::from_shape(shape, values).map_err(|error| error.to_string())
}

/// To rten's integer kernels NaN is a number.
pub(crate) fn check_numbers(values: &[Value]) -> Result<(), DeployError> {
    // An infinity it takes for the lowest code.
    let has_no_code = |value: &Value| match value {
        Value::FloatTensor(x) => x.iter().any(|x| !x.is_finite()),
        _ => false,
    };
    match values.iter().any(has_no_code) {
        false => Ok(()),
        true => Err(DeployError::Run {
            reason:
                "an input has NaN or an infinity, for which rten's integers have no code: compile \
                     with `Backend::Own`, or with `Arithmetic::Float`"
                    .into(),
        }),
    }
}

/// The engine's results as tensors on a device.
pub(crate) fn results(
    values: Vec<Value>,
    outputs: &[ValueInfo],
    device: &DispatchDevice,
) -> Result<Vec<DispatchTensor>, DeployError> {
    values
        .into_iter()
        .zip(outputs)
        .map(|(value, info)| {
            let tensor = match value {
                Value::FloatTensor(x) => Dispatch::float_from_data(data_of(x), device),
                Value::Int32Tensor(x) => match info.element {
                    ElementType::Bool => {
                        let store = get_device_settings::<Dispatch>(device).bool_dtype;
                        let data = data_of(x).convert_dtype(store.into());
                        Dispatch::bool_from_data(data, device)
                    }
                    other => Dispatch::int_from_data(integers(x, other), device),
                },
                other => {
                    return Err(DeployError::Run {
                        reason: format!("`{}` came as {:?}", info.name, other.dtype()),
                    });
                }
            };
            Ok(tensor)
        })
        .collect()
}

/// Integers of a dtype; what it does not hold has its lowest bits, as Burn's casts and sums have.
fn integers(x: Tensor<i32>, element: ElementType) -> TensorData {
    match element {
        ElementType::I64 => each(x, i64::from),
        ElementType::I16 => each(x, |x| x as i16),
        ElementType::I8 => each(x, |x| x as i8),
        ElementType::U64 => each(x, |x| x as u64),
        ElementType::U32 => each(x, |x| x as u32),
        ElementType::U16 => each(x, |x| x as u16),
        ElementType::U8 => each(x, |x| x as u8),
        _ => data_of(x),
    }
}

fn each<T: Element>(x: Tensor<i32>, to: impl Fn(i32) -> T) -> TensorData {
    let shape = x.shape().to_vec();
    let values: Vec<T> = x.into_data().into_iter().map(to).collect();
    TensorData::new(values, shape)
}

fn data_of<T: Element>(x: Tensor<T>) -> TensorData {
    let shape = x.shape().to_vec();
    TensorData::new(x.into_data(), shape)
}

/// A result of the engine on the host.
pub(crate) fn to_data(value: Value) -> Result<TensorData, DeployError> {
    Ok(match value {
        Value::FloatTensor(x) => data_of(x),
        Value::Int32Tensor(x) => data_of(x),
        Value::Int8Tensor(x) => data_of(x),
        Value::UInt8Tensor(x) => data_of(x),
        other => {
            return Err(DeployError::Run {
                reason: format!("a result came as {:?}", other.dtype()),
            });
        }
    })
}
