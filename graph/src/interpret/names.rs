//! A name of ours for each operation.

use burn::backend::ir::{
    ActivationOperationIr, BaseOperationIr, BoolOperationIr, DistributedOperationIr,
    FloatOperationIr, IntOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr,
};

/// A stable name of an operation: `"matmul"`, `"conv2d"`, `"softmax"`.
///
/// Operations that differ in the kind of tensor alone (floats, ints, bools) share a name. Those of a
/// backward pass end in `_backward`, those with a number as second operand in `_scalar` or, for
/// comparisons, `_elem`. `"init"` and `"drop"` compute nothing.
pub fn name(operation: &OperationIr) -> &'static str {
    match operation {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            base(op)
        }
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => numeric(op),
        OperationIr::Float(_, op) => float(op),
        OperationIr::Int(op) => int(op),
        OperationIr::Bool(op) => boolean(op),
        OperationIr::Module(op) => module(op),
        OperationIr::Activation(op) => activation(op),
        OperationIr::Init(_) => "init",
        OperationIr::Drop(_) => "drop",
        OperationIr::Custom(_) => "custom",
        OperationIr::Distributed(op) => distributed(op),
    }
}

fn base(op: &BaseOperationIr) -> &'static str {
    use BaseOperationIr::*;
    match op {
        Reshape(_) => "reshape",
        SwapDims(_) => "swap_dims",
        Permute(_) => "permute",
        Flip(_) => "flip",
        Expand(_) => "expand",
        Unfold(_) => "unfold",
        Slice(_) => "slice",
        SliceAssign(_) => "slice_assign",
        Select(_) => "select",
        SelectAssign(_) => "select_assign",
        MaskWhere(_) => "mask_where",
        MaskFill(_) => "mask_fill",
        Gather(_) => "gather",
        Scatter(_) => "scatter",
        ScatterNd(_) => "scatter_nd",
        GatherNd(_) => "gather_nd",
        Equal(_) => "equal",
        EqualElem(_) => "equal_elem",
        RepeatDim(_) => "repeat_dim",
        Cat(_) => "cat",
        Cast(_) => "cast",
        Empty(_) => "empty",
        Ones(_) => "ones",
        Zeros(_) => "zeros",
        NotEqual(_) => "not_equal",
        NotEqualElem(_) => "not_equal_elem",
        All(_) => "all",
        Any(_) => "any",
        AllDim(_) => "all_dim",
        AnyDim(_) => "any_dim",
    }
}

fn numeric(op: &NumericOperationIr) -> &'static str {
    use NumericOperationIr::*;
    match op {
        Add(_) => "add",
        AddScalar(_) => "add_scalar",
        Sub(_) => "sub",
        SubScalar(_) => "sub_scalar",
        Div(_) => "div",
        DivScalar(_) => "div_scalar",
        Rem(_) => "remainder",
        RemScalar(_) => "remainder_scalar",
        Mul(_) => "mul",
        MulScalar(_) => "mul_scalar",
        Abs(_) => "abs",
        Full(_) => "full",
        MeanDim(_) => "mean_dim",
        Mean(_) => "mean",
        Sum(_) => "sum",
        SumDim(_) => "sum_dim",
        SumDims(_) => "sum_dims",
        Prod(_) => "prod",
        ProdDim(_) => "prod_dim",
        Greater(_) => "greater",
        GreaterElem(_) => "greater_elem",
        GreaterEqual(_) => "greater_equal",
        GreaterEqualElem(_) => "greater_equal_elem",
        Lower(_) => "lower",
        LowerElem(_) => "lower_elem",
        LowerEqual(_) => "lower_equal",
        LowerEqualElem(_) => "lower_equal_elem",
        ArgMax(_) => "argmax",
        ArgTopK(_) => "argtopk",
        TopK(_) => "topk",
        TopKWithIndices(_) => "topk_with_indices",
        ArgMin(_) => "argmin",
        Max(_) => "max",
        MaxDimWithIndices(_) => "max_dim_with_indices",
        MinDimWithIndices(_) => "min_dim_with_indices",
        Min(_) => "min",
        MaxDim(_) => "max_dim",
        MinDim(_) => "min_dim",
        MaxAbs(_) => "max_abs",
        MaxAbsDim(_) => "max_abs_dim",
        Clamp(_) => "clamp",
        IntRandom(_) => "random",
        Powi(_) => "powi",
        PowiScalar(_) => "powi_scalar",
        CumSum(_) => "cumsum",
        CumProd(_) => "cumprod",
        CumMin(_) => "cummin",
        CumMax(_) => "cummax",
        Neg(_) => "neg",
        Sign(_) => "sign",
        ClampMin(_) => "clamp_min",
        ClampMax(_) => "clamp_max",
        Sort(_) => "sort",
        SortWithIndices(_) => "sort_with_indices",
        ArgSort(_) => "argsort",
        Pad(_) => "pad",
    }
}

fn float(op: &FloatOperationIr) -> &'static str {
    use FloatOperationIr::*;
    match op {
        Exp(_) => "exp",
        Log(_) => "log",
        Log1p(_) => "log1p",
        Erf(_) => "erf",
        PowfScalar(_) => "powf_scalar",
        Sqrt(_) => "sqrt",
        Cos(_) => "cos",
        Cosh(_) => "cosh",
        Sin(_) => "sin",
        Sinh(_) => "sinh",
        Tan(_) => "tan",
        Tanh(_) => "tanh",
        ArcCos(_) => "acos",
        ArcCosh(_) => "acosh",
        ArcSin(_) => "asin",
        ArcSinh(_) => "asinh",
        ArcTan(_) => "atan",
        ArcTanh(_) => "atanh",
        ArcTan2(_) => "atan2",
        Round(_) => "round",
        Floor(_) => "floor",
        Ceil(_) => "ceil",
        Trunc(_) => "trunc",
        IntoInt(_) => "into_int",
        Matmul(_) => "matmul",
        Cross(_) => "cross",
        Random(_) => "random",
        Recip(_) => "recip",
        IsNan(_) => "is_nan",
        IsInf(_) => "is_inf",
        Quantize(_) => "quantize",
        Dequantize(_) => "dequantize",
        GridSample2d(_) => "grid_sample_2d",
        Powf(_) => "powf",
        Hypot(_) => "hypot",
    }
}

fn int(op: &IntOperationIr) -> &'static str {
    use IntOperationIr::*;
    match op {
        IntoFloat(_) => "into_float",
        BitwiseAnd(_) => "bitwise_and",
        BitwiseAndScalar(_) => "bitwise_and_scalar",
        BitwiseOr(_) => "bitwise_or",
        BitwiseOrScalar(_) => "bitwise_or_scalar",
        BitwiseXor(_) => "bitwise_xor",
        BitwiseXorScalar(_) => "bitwise_xor_scalar",
        BitwiseNot(_) => "bitwise_not",
        BitwiseLeftShift(_) => "bitwise_left_shift",
        BitwiseLeftShiftScalar(_) => "bitwise_left_shift_scalar",
        BitwiseRightShift(_) => "bitwise_right_shift",
        BitwiseRightShiftScalar(_) => "bitwise_right_shift_scalar",
        Matmul(_) => "matmul",
    }
}

fn boolean(op: &BoolOperationIr) -> &'static str {
    use BoolOperationIr::*;
    match op {
        IntoFloat(_) => "into_float",
        IntoInt(_) => "into_int",
        Not(_) => "not",
        And(_) => "and",
        Or(_) => "or",
        Xor(_) => "xor",
    }
}

fn module(op: &ModuleOperationIr) -> &'static str {
    use ModuleOperationIr::*;
    match op {
        BatchNorm(_) => "batch_norm",
        Embedding(_) => "embedding",
        EmbeddingBackward(_) => "embedding_backward",
        Linear(_) => "linear",
        LinearXBackward(_) => "linear_x_backward",
        LinearWeightBackward(_) => "linear_weight_backward",
        LinearBiasBackward(_) => "linear_bias_backward",
        Conv1d(_) => "conv1d",
        Conv1dXBackward(_) => "conv1d_x_backward",
        Conv1dWeightBackward(_) => "conv1d_weight_backward",
        Conv1dBiasBackward(_) => "conv1d_bias_backward",
        Conv2d(_) => "conv2d",
        Conv2dXBackward(_) => "conv2d_x_backward",
        Conv2dWeightBackward(_) => "conv2d_weight_backward",
        Conv2dBiasBackward(_) => "conv2d_bias_backward",
        Conv3d(_) => "conv3d",
        Conv3dXBackward(_) => "conv3d_x_backward",
        Conv3dWeightBackward(_) => "conv3d_weight_backward",
        Conv3dBiasBackward(_) => "conv3d_bias_backward",
        DeformableConv2d(_) => "deform_conv2d",
        DeformableConv2dBackward(_) => "deform_conv2d_backward",
        ConvTranspose1d(_) => "conv_transpose1d",
        ConvTranspose2d(_) => "conv_transpose2d",
        ConvTranspose3d(_) => "conv_transpose3d",
        AvgPool1d(_) => "avg_pool1d",
        AvgPool2d(_) => "avg_pool2d",
        AvgPool1dBackward(_) => "avg_pool1d_backward",
        AvgPool2dBackward(_) => "avg_pool2d_backward",
        AdaptiveAvgPool1d(_) => "adaptive_avg_pool1d",
        AdaptiveAvgPool2d(_) => "adaptive_avg_pool2d",
        AdaptiveAvgPool1dBackward(_) => "adaptive_avg_pool1d_backward",
        AdaptiveAvgPool2dBackward(_) => "adaptive_avg_pool2d_backward",
        AdaptiveAvgPool3d(_) => "adaptive_avg_pool3d",
        AdaptiveAvgPool3dBackward(_) => "adaptive_avg_pool3d_backward",
        MaxPool1d(_) => "max_pool1d",
        MaxPool1dWithIndices(_) => "max_pool1d_with_indices",
        MaxPool1dWithIndicesBackward(_) => "max_pool1d_with_indices_backward",
        MaxPool2d(_) => "max_pool2d",
        MaxPool2dWithIndices(_) => "max_pool2d_with_indices",
        MaxPool2dWithIndicesBackward(_) => "max_pool2d_with_indices_backward",
        Interpolate(_) => "interpolate",
        InterpolateBackward(_) => "interpolate_backward",
        Attention(_) => "attention",
        CtcLoss(_) => "ctc_loss",
        CtcLossBackward(_) => "ctc_loss_backward",
        LayerNorm(_) => "layer_norm",
        Unfold4d(_) => "unfold4d",
        ConvTranspose1dWeightBackward(_) => "conv_transpose1d_weight_backward",
        ConvTranspose1dBiasBackward(_) => "conv_transpose1d_bias_backward",
        ConvTranspose2dWeightBackward(_) => "conv_transpose2d_weight_backward",
        ConvTranspose2dBiasBackward(_) => "conv_transpose2d_bias_backward",
        ConvTranspose3dWeightBackward(_) => "conv_transpose3d_weight_backward",
        ConvTranspose3dBiasBackward(_) => "conv_transpose3d_bias_backward",
    }
}

fn activation(op: &ActivationOperationIr) -> &'static str {
    use ActivationOperationIr::*;
    match op {
        Relu(_) => "relu",
        ReluBackward(_) => "relu_backward",
        LeakyRelu(_) => "leaky_relu",
        PRelu(_) => "prelu",
        Gelu(_) => "gelu",
        GeluBackward(_) => "gelu_backward",
        Sigmoid(_) => "sigmoid",
        SigmoidBackward(_) => "sigmoid_backward",
        HardSigmoid(_) => "hard_sigmoid",
        LogSigmoid(_) => "log_sigmoid",
        LogSigmoidBackward(_) => "log_sigmoid_backward",
        Softmax(_) => "softmax",
        LogSoftmax(_) => "log_softmax",
        Softmin(_) => "softmin",
    }
}

fn distributed(op: &DistributedOperationIr) -> &'static str {
    use DistributedOperationIr::*;
    match op {
        AllReduce(_) => "all_reduce",
        SyncCollective => "sync_collective",
    }
}
