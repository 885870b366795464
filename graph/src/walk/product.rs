//! A linear operation with a weight: products with a matrix, convolutions, embeddings.

use burn::backend::ir::{ModuleOperationIr, OperationIr, TensorId, TensorIr};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Tensor};

use super::script::Script;
use crate::Parameter;

/// An operation that is linear in a weight: `matmul`, `linear`, `conv1d` to `conv3d`, `embedding`.
///
/// Seen as `Y = X Wᵀ`, with `W` of shape `[outputs, inputs]` and `X` of shape `[rows, inputs]`. A
/// convolution with groups is one such product for each group, whose outputs follow each other in
/// `W`; its rows are the patches under the kernel, one for each position of each example, ordered
/// as the kernel is: channel, then place. An embedding has one-hot rows.
#[derive(Debug, Clone)]
pub struct Product {
    /// The weight.
    pub parameter: Parameter,
    /// Its position in the graph.
    pub node: usize,
    /// Rows of `W`, over all groups.
    pub outputs: usize,
    /// Columns of `W`: inputs of an output.
    pub inputs: usize,
    /// Groups of a convolution, 1 elsewhere.
    pub groups: usize,
    pub(super) kind: Kind,
    /// The parameter is stored as `[inputs, outputs]`.
    pub(super) is_transposed: bool,
    /// Which operand is multiplied by the weight.
    pub(super) input: TensorIr,
}

/// How rows come from the operand.
#[derive(Debug, Clone)]
pub(super) enum Kind {
    /// The last dimension of the operand is that of the inputs.
    Last,
    /// The last but one is: the weight is on the left.
    LastButOne,
    /// Patches.
    Patches(Kernel),
    /// Indices.
    OneHot,
}

/// The geometry of a convolution in one to three dimensions, a number for each of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Elements.
    pub size: Vec<usize>,
    /// Steps between the places of the kernel.
    pub stride: Vec<usize>,
    /// Zeros before and after.
    pub padding: Vec<(usize, usize)>,
    /// Steps between the elements.
    pub dilation: Vec<usize>,
}

impl Product {
    /// Whether its rows are one-hot: `XᵀX` is the diagonal of how often each index occurs.
    pub fn is_embedding(&self) -> bool {
        matches!(self.kind, Kind::OneHot)
    }

    /// Whether it is a convolution.
    pub fn is_convolution(&self) -> bool {
        matches!(self.kind, Kind::Patches(_))
    }

    /// The operand that is multiplied by the weight: products with the same one read the same rows.
    pub fn input_id(&self) -> TensorId {
        self.input.id
    }

    /// Outputs of one group.
    pub fn outputs_per_group(&self) -> usize {
        self.outputs / self.groups
    }

    /// Whether the parameter holds the transpose of `W`, `[inputs, outputs]`.
    pub fn is_transposed(&self) -> bool {
        self.is_transposed
    }

    /// The axis of the features in an operand of so many axes.
    pub(super) fn features_axis(&self, rank: usize) -> Option<usize> {
        match &self.kind {
            Kind::Last => rank.checked_sub(1),
            Kind::LastButOne => rank.checked_sub(2),
            Kind::Patches(_) => Some(1),
            Kind::OneHot => None,
        }
    }

    /// A value of the parameter as `W`.
    pub(super) fn matrix(&self, value: DispatchTensor) -> Tensor<2> {
        let (outputs, inputs) = (self.outputs, self.inputs);
        let reshape = |shape| Dispatch::float_reshape(value, Shape::new(shape));
        Tensor::from_dispatch(match self.is_transposed {
            true => Dispatch::float_swap_dims(reshape([inputs, outputs]), 0, 1),
            false => reshape([outputs, inputs]),
        })
    }

    /// `W` as a value of the parameter.
    pub(super) fn value(&self, matrix: Tensor<2>) -> DispatchTensor {
        let matrix = match self.is_transposed {
            true => matrix.swap_dims(0, 1),
            false => matrix,
        };
        let shape = Shape::from(self.parameter.shape.clone());
        Dispatch::float_reshape(matrix.into_dispatch(), shape)
    }
}

/// The product at an operation, if it is one.
pub(super) fn product(script: &Script, node: usize) -> Option<Product> {
    use ModuleOperationIr::{Conv1d, Conv2d, Conv3d, Embedding, Linear};
    use burn::backend::ir::FloatOperationIr::Matmul;
    macro_rules! convolution {
        ($o:ident, $padding:expr) => {{
            let kernel = Kernel {
                size: $o.weight.shape.to_vec()[2..].to_vec(),
                stride: $o.options.stride.to_vec(),
                padding: $padding.to_vec(),
                dilation: $o.options.dilation.to_vec(),
            };
            convolution(script, node, &$o.weight, &$o.x, kernel, $o.options.groups)
        }};
    }
    match &script.graph.operations[node] {
        OperationIr::Float(_, Matmul(o)) if !script.is_fixed(o.lhs.id) => {
            matrix(script, node, &o.rhs, &o.lhs, Kind::Last)
        }
        OperationIr::Float(_, Matmul(o)) if !script.is_fixed(o.rhs.id) => {
            matrix(script, node, &o.lhs, &o.rhs, Kind::LastButOne)
        }
        OperationIr::Module(Linear(o)) => matrix(script, node, &o.weight, &o.x, Kind::Last),
        OperationIr::Module(Embedding(o)) => {
            matrix(script, node, &o.weights, &o.indices, Kind::OneHot)
        }
        OperationIr::Module(Conv1d(o)) => convolution!(o, o.options.padding),
        OperationIr::Module(Conv2d(o)) => convolution!(o, o.options.padding),
        OperationIr::Module(Conv3d(o)) => {
            convolution!(o, o.options.padding.map(|pad| (pad, pad)))
        }
        _ => None,
    }
}

fn matrix(
    script: &Script,
    node: usize,
    weight: &TensorIr,
    input: &TensorIr,
    kind: Kind,
) -> Option<Product> {
    let view = script.view(weight.id)?;
    let shape = weight.shape.to_vec();
    let parameter = script.graph.parameters[view.parameter].clone();
    let [.., rows, columns] = shape[..] else {
        return None;
    };
    let [leading @ .., row_axis, column_axis] = &view.axes[..] else {
        return None;
    };
    // Leading dimensions of its own make it several products; all of the parameter takes part. Without an
    // element there is nothing to sum over.
    let size = rows * columns;
    if leading.iter().any(Option::is_some) || size == 0 || size != elements(&parameter) {
        return None;
    }
    let (inputs, outputs, input_axis, output_axis) = match kind {
        Kind::LastButOne => (columns, rows, column_axis, row_axis),
        _ => (rows, columns, row_axis, column_axis),
    };
    Some(Product {
        parameter,
        node,
        outputs,
        inputs,
        groups: 1,
        kind,
        // Where a size is 1, both orders are the same numbers.
        is_transposed: matches!((input_axis, output_axis), (Some(i), Some(o)) if i < o),
        input: input.clone(),
    })
}

fn convolution(
    script: &Script,
    node: usize,
    weight: &TensorIr,
    input: &TensorIr,
    kernel: Kernel,
    groups: usize,
) -> Option<Product> {
    let view = script.view(weight.id)?;
    let parameter = script.graph.parameters[view.parameter].clone();
    let order: Vec<usize> = view.axes.iter().flatten().copied().collect();
    let shape = weight.shape.to_vec();
    let inputs = shape[1..].iter().product();
    let whole = shape.iter().product::<usize>() == elements(&parameter);
    (order.is_sorted() && whole && elements(&parameter) > 0).then(|| Product {
        parameter,
        node,
        outputs: shape[0],
        inputs,
        groups,
        kind: Kind::Patches(kernel),
        is_transposed: false,
        input: input.clone(),
    })
}

/// Whether a value fits a parameter.
pub(super) fn fits(value: &DispatchTensor, parameter: &Parameter) -> bool {
    value.shape().to_vec() == parameter.shape
}

fn elements(parameter: &Parameter) -> usize {
    parameter.shape.iter().product()
}
