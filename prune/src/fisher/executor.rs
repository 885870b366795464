//! Runs a recorded loss operation by operation, with something to do at every weight.
//!
//! Burn has no hooks, so this is how inputs and output gradients of the layers inside of any model
//! become visible. Operations go to Burn's dispatch, which does what the model's own calls would
//! have done, autodiff included. Not every operation is known here: an unknown one is an error
//! with its name, and the caller does without.

use std::collections::HashMap;

use burn::backend::ir::{
    ActivationOperationIr, BaseOperationIr, BoolOperationIr, FloatOperationIr, IntOperationIr,
    ModuleOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus,
};
use burn::backend::ops::{ActivationOps, BoolTensorOps, FloatTensorOps, IntTensorOps, ModuleOps};
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{Device, TensorData};

use crate::fisher::trace::Trace;

/// What an execution does with the output of each operation.
pub(crate) trait Observer {
    /// Called for an operation with the tensors it reads; returns what to use as its output.
    fn observe(
        &mut self,
        operation: &OperationIr,
        tensors: &Tensors,
        output: DispatchTensor,
    ) -> Result<DispatchTensor, String>;
}

/// The tensors that are alive.
pub(crate) struct Tensors {
    alive: HashMap<TensorId, DispatchTensor>,
}

impl Tensors {
    /// A tensor that the current operation reads.
    pub(crate) fn get(&self, tensor: &TensorIr) -> Result<DispatchTensor, String> {
        let found = self.alive.get(&tensor.id).cloned();
        found.ok_or_else(|| format!("tensor {} is not there", tensor.id))
    }
}

/// Runs `trace` on `device` and returns the loss; `parameters` replace the recorded values of
/// tensors. Fails with the name of an operation that is not known.
pub(crate) fn execute(
    trace: &Trace,
    parameters: &HashMap<TensorId, DispatchTensor>,
    device: &Device,
    observer: &mut dyn Observer,
) -> Result<DispatchTensor, String> {
    let mut tensors = Tensors {
        alive: HashMap::new(),
    };
    for operation in &trace.operations {
        match operation {
            OperationIr::Drop(tensor) => {
                if tensor.id != trace.output {
                    tensors.alive.remove(&tensor.id);
                }
                continue;
            }
            OperationIr::Init(init) => {
                let id = init.out.id;
                let value = match (parameters.get(&id), trace.values.get(&id)) {
                    (Some(parameter), _) => parameter.clone(),
                    (None, Some(data)) => upload(data.clone(), device),
                    (None, None) => return Err(format!("tensor {id} has no value")),
                };
                tensors.alive.insert(id, value);
                continue;
            }
            _ => {}
        }
        let output = run(operation, &tensors, device)
            .ok_or_else(|| format!("operation {} is not known", name(operation)))??;
        let output = observer.observe(operation, &tensors, output)?;
        for input in operation.inputs() {
            if matches!(input.status, TensorStatus::ReadWrite) && input.id != trace.output {
                tensors.alive.remove(&input.id);
            }
        }
        let Some(out) = operation.outputs().next() else {
            return Err(format!("operation {} has no output", name(operation)));
        };
        tensors.alive.insert(out.id, output);
    }
    let loss = tensors.alive.remove(&trace.output);
    loss.ok_or_else(|| "the loss was not computed".into())
}

/// A host tensor on the device.
pub(crate) fn upload(data: TensorData, device: &Device) -> DispatchTensor {
    let device = device.as_dispatch();
    match data.dtype() {
        dtype if dtype.is_float() => Dispatch::float_from_data(data, device),
        dtype if dtype.is_bool() => Dispatch::bool_from_data(data, device),
        _ => Dispatch::int_from_data(data, device),
    }
}

/// Innermost variant of an operation: `Matmul` of `Float(F32, Matmul(…))`. Burn gives operations no
/// name; their `Debug` form is the variant path.
pub(crate) fn name(operation: &OperationIr) -> String {
    let debug = format!("{operation:?}");
    let mut variants = debug.split('(').skip(1);
    let inner = variants.next().unwrap_or_default();
    let inner = inner.rsplit(", ").next().unwrap_or(inner);
    inner.chars().take_while(|c| c.is_alphanumeric()).collect()
}

/// The output of an operation; `None` where it is not known.
fn run(
    operation: &OperationIr,
    tensors: &Tensors,
    device: &Device,
) -> Option<Result<DispatchTensor, String>> {
    let get = |tensor: &TensorIr| tensors.get(tensor);
    let output = match operation {
        OperationIr::BaseFloat(op) => base_float(op, &get, device)?,
        OperationIr::NumericFloat(_, op) => numeric_float(op, &get, device)?,
        OperationIr::Float(_, op) => float(op, &get)?,
        OperationIr::Module(op) => module(op, &get)?,
        OperationIr::Activation(op) => activation(op, &get)?,
        OperationIr::BaseInt(op) => base_int(op, &get)?,
        OperationIr::BaseBool(op) => base_bool(op, &get)?,
        OperationIr::Int(IntOperationIr::IntoFloat(op)) => {
            get(&op.input).map(|x| Dispatch::int_into_float(x, op.out.dtype.into()))
        }
        OperationIr::Bool(BoolOperationIr::IntoFloat(op)) => {
            get(&op.input).map(|x| Dispatch::bool_into_float(x, op.out.dtype.into()))
        }
        OperationIr::Bool(BoolOperationIr::Not(op)) => get(&op.input).map(Dispatch::bool_not),
        _ => return None,
    };
    Some(output)
}

type Output = Option<Result<DispatchTensor, String>>;
type Get<'a> = &'a dyn Fn(&TensorIr) -> Result<DispatchTensor, String>;

fn two(
    get: Get<'_>,
    one: &TensorIr,
    other: &TensorIr,
    combine: impl FnOnce(DispatchTensor, DispatchTensor) -> DispatchTensor,
) -> Result<DispatchTensor, String> {
    Ok(combine(get(one)?, get(other)?))
}

fn optional(get: Get<'_>, tensor: &Option<TensorIr>) -> Result<Option<DispatchTensor>, String> {
    tensor.as_ref().map(get).transpose()
}

fn base_float(op: &BaseOperationIr, get: Get<'_>, device: &Device) -> Output {
    use BaseOperationIr::*;
    let on = device.as_dispatch();
    Some(match op {
        Reshape(o) => get(&o.input).map(|x| Dispatch::float_reshape(x, o.out.shape.clone())),
        SwapDims(o) => get(&o.input).map(|x| Dispatch::float_swap_dims(x, o.dim1, o.dim2)),
        Permute(o) => get(&o.input).map(|x| Dispatch::float_permute(x, &o.axes)),
        Flip(o) => get(&o.input).map(|x| Dispatch::float_flip(x, &o.axes)),
        Expand(o) => get(&o.input).map(|x| Dispatch::float_expand(x, o.out.shape.clone())),
        Unfold(o) => get(&o.input).map(|x| Dispatch::float_unfold(x, o.dim, o.size, o.step)),
        Slice(o) => get(&o.tensor).map(|x| Dispatch::float_slice(x, &o.ranges)),
        Select(o) => two(get, &o.tensor, &o.indices, |x, i| {
            Dispatch::float_select(x, o.dim, i)
        }),
        Gather(o) => two(get, &o.tensor, &o.indices, |x, i| {
            Dispatch::float_gather(o.dim, x, i)
        }),
        MaskFill(o) => two(get, &o.tensor, &o.mask, |x, mask| {
            Dispatch::float_mask_fill(x, mask, o.value.into())
        }),
        MaskWhere(o) => (|| {
            let (x, mask, value) = (get(&o.tensor)?, get(&o.mask)?, get(&o.value)?);
            Ok(Dispatch::float_mask_where(x, mask, value))
        })(),
        RepeatDim(o) => get(&o.tensor).map(|x| Dispatch::float_repeat_dim(x, o.dim, o.times)),
        Cat(o) => {
            let parts: Result<Vec<_>, _> = o.tensors.iter().map(get).collect();
            parts.map(|parts| Dispatch::float_cat(parts, o.dim))
        }
        Cast(o) => get(&o.input).map(|x| Dispatch::float_cast(x, o.out.dtype.into())),
        Ones(o) => Ok(Dispatch::float_ones(
            o.out.shape.clone(),
            on,
            o.out.dtype.into(),
        )),
        Zeros(o) => Ok(Dispatch::float_zeros(
            o.out.shape.clone(),
            on,
            o.out.dtype.into(),
        )),
        _ => return None,
    })
}

fn numeric_float(op: &NumericOperationIr, get: Get<'_>, device: &Device) -> Output {
    use NumericOperationIr::*;
    let on = device.as_dispatch();
    Some(match op {
        Add(o) => two(get, &o.lhs, &o.rhs, Dispatch::float_add),
        Sub(o) => two(get, &o.lhs, &o.rhs, Dispatch::float_sub),
        Mul(o) => two(get, &o.lhs, &o.rhs, Dispatch::float_mul),
        Div(o) => two(get, &o.lhs, &o.rhs, Dispatch::float_div),
        AddScalar(o) => get(&o.lhs).map(|x| Dispatch::float_add_scalar(x, o.rhs.into())),
        SubScalar(o) => get(&o.lhs).map(|x| Dispatch::float_sub_scalar(x, o.rhs.into())),
        MulScalar(o) => get(&o.lhs).map(|x| Dispatch::float_mul_scalar(x, o.rhs.into())),
        DivScalar(o) => get(&o.lhs).map(|x| Dispatch::float_div_scalar(x, o.rhs.into())),
        PowiScalar(o) => get(&o.lhs).map(|x| Dispatch::float_powi_scalar(x, o.rhs.into())),
        ClampMin(o) => get(&o.lhs).map(|x| Dispatch::float_clamp_min(x, o.rhs.into())),
        ClampMax(o) => get(&o.lhs).map(|x| Dispatch::float_clamp_max(x, o.rhs.into())),
        Clamp(o) => get(&o.tensor).map(|x| Dispatch::float_clamp(x, o.min.into(), o.max.into())),
        Neg(o) => get(&o.input).map(Dispatch::float_neg),
        Abs(o) => get(&o.input).map(Dispatch::float_abs),
        Sign(o) => get(&o.input).map(Dispatch::float_sign),
        Mean(o) => get(&o.input).map(Dispatch::float_mean),
        Sum(o) => get(&o.input).map(Dispatch::float_sum),
        MeanDim(o) => get(&o.input).map(|x| Dispatch::float_mean_dim(x, o.axis)),
        SumDim(o) => get(&o.input).map(|x| Dispatch::float_sum_dim(x, o.axis)),
        MaxDim(o) => get(&o.input).map(|x| Dispatch::float_max_dim(x, o.axis)),
        Full(o) => {
            let (shape, dtype) = (o.out.shape.clone(), o.out.dtype.into());
            Ok(Dispatch::float_full(shape, o.value.into(), on, dtype))
        }
        _ => return None,
    })
}

fn float(op: &FloatOperationIr, get: Get<'_>) -> Output {
    use FloatOperationIr::*;
    Some(match op {
        Matmul(o) => two(get, &o.lhs, &o.rhs, Dispatch::float_matmul),
        Exp(o) => get(&o.input).map(Dispatch::float_exp),
        Log(o) => get(&o.input).map(Dispatch::float_log),
        Log1p(o) => get(&o.input).map(Dispatch::float_log1p),
        Sqrt(o) => get(&o.input).map(Dispatch::float_sqrt),
        Tanh(o) => get(&o.input).map(Dispatch::float_tanh),
        Erf(o) => get(&o.input).map(Dispatch::float_erf),
        Recip(o) => get(&o.input).map(Dispatch::float_recip),
        PowfScalar(o) => get(&o.lhs).map(|x| Dispatch::float_powf_scalar(x, o.rhs.into())),
        _ => return None,
    })
}

fn module(op: &ModuleOperationIr, get: Get<'_>) -> Output {
    use ModuleOperationIr::*;
    Some(match op {
        Linear(o) => (|| {
            let (x, weight) = (get(&o.x)?, get(&o.weight)?);
            Ok(Dispatch::linear(x, weight, optional(get, &o.bias)?))
        })(),
        Conv1d(o) => (|| {
            let (x, weight, bias) = (get(&o.x)?, get(&o.weight)?, optional(get, &o.bias)?);
            Ok(Dispatch::conv1d(x, weight, bias, o.options.clone().into()))
        })(),
        Conv2d(o) => (|| {
            let (x, weight, bias) = (get(&o.x)?, get(&o.weight)?, optional(get, &o.bias)?);
            Ok(Dispatch::conv2d(x, weight, bias, o.options.clone().into()))
        })(),
        BatchNorm(o) => (|| {
            let (x, gamma, beta) = (get(&o.x)?, get(&o.gamma)?, get(&o.beta)?);
            let (mean, variance) = (get(&o.mean)?, get(&o.variance)?);
            let epsilon = o.epsilon.elem();
            Ok(Dispatch::batch_norm(
                x, gamma, beta, mean, variance, epsilon,
            ))
        })(),
        LayerNorm(o) => (|| {
            let (x, gamma, beta) = (get(&o.input)?, get(&o.gamma)?, optional(get, &o.beta)?);
            Ok(Dispatch::layer_norm(x, gamma, beta, o.epsilon.elem()))
        })(),
        Embedding(o) => two(get, &o.weights, &o.indices, Dispatch::embedding),
        Attention(o) => (|| {
            let (query, key, value) = (get(&o.query)?, get(&o.key)?, get(&o.value)?);
            let (mask, bias) = (optional(get, &o.mask)?, optional(get, &o.attn_bias)?);
            let options = o.options.clone().into();
            Ok(Dispatch::attention(query, key, value, mask, bias, options))
        })(),
        MaxPool2d(o) => get(&o.x).map(|x| {
            let (size, stride, padding) = (o.kernel_size, o.stride, o.padding);
            Dispatch::max_pool2d(x, size, stride, padding, o.dilation, o.ceil_mode)
        }),
        AvgPool2d(o) => get(&o.x).map(|x| {
            let (size, stride, padding) = (o.kernel_size, o.stride, o.padding);
            Dispatch::avg_pool2d(x, size, stride, padding, o.count_include_pad, o.ceil_mode)
        }),
        AdaptiveAvgPool2d(o) => get(&o.x).map(|x| Dispatch::adaptive_avg_pool2d(x, o.output_size)),
        _ => return None,
    })
}

fn activation(op: &ActivationOperationIr, get: Get<'_>) -> Output {
    use ActivationOperationIr::*;
    Some(match op {
        Relu(o) => get(&o.input).map(Dispatch::relu),
        LeakyRelu(o) => get(&o.lhs).map(|x| Dispatch::leaky_relu(x, o.rhs.into())),
        Gelu(o) => get(&o.input).map(Dispatch::gelu),
        Sigmoid(o) => get(&o.input).map(Dispatch::sigmoid),
        LogSigmoid(o) => get(&o.input).map(Dispatch::log_sigmoid),
        Softmax(o) => get(&o.input).map(|x| Dispatch::softmax(x, o.axis)),
        LogSoftmax(o) => get(&o.input).map(|x| Dispatch::log_softmax(x, o.axis)),
        _ => return None,
    })
}

fn base_int(op: &BaseOperationIr, get: Get<'_>) -> Output {
    use BaseOperationIr::*;
    Some(match op {
        Reshape(o) => get(&o.input).map(|x| Dispatch::int_reshape(x, o.out.shape.clone())),
        Expand(o) => get(&o.input).map(|x| Dispatch::int_expand(x, o.out.shape.clone())),
        SwapDims(o) => get(&o.input).map(|x| Dispatch::int_swap_dims(x, o.dim1, o.dim2)),
        Slice(o) => get(&o.tensor).map(|x| Dispatch::int_slice(x, &o.ranges)),
        _ => return None,
    })
}

fn base_bool(op: &BaseOperationIr, get: Get<'_>) -> Output {
    use BaseOperationIr::*;
    Some(match op {
        Reshape(o) => get(&o.input).map(|x| Dispatch::bool_reshape(x, o.out.shape.clone())),
        Expand(o) => get(&o.input).map(|x| Dispatch::bool_expand(x, o.out.shape.clone())),
        SwapDims(o) => get(&o.input).map(|x| Dispatch::bool_swap_dims(x, o.dim1, o.dim2)),
        _ => return None,
    })
}
