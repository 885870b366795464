//! In which precision each operation of a graph is executed.

use burn::backend::ir::{BaseOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr};
use burn::tensor::{DType, FloatDType};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use crate::graph::composite::CompositeKind;
use crate::{Graph, Node};

/// What an execution does with the float operands of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Cast to the half dtype of the rules.
    Half,
    /// Cast to F32.
    Full,
    /// As they come; to F32 where their dtypes differ.
    Widest,
    /// To F32 where all that read the results run in F32, so that nothing is rounded in between;
    /// as [`Widest`](Self::Widest) otherwise.
    Follow,
    /// As they come.
    AsRecorded,
}

/// How a device computes in a half dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// By itself.
    Native,
    /// Half is how tensors are stored: operations run in F32 on widened operands, and what leaves
    /// a product is rounded where it is read in half, as units with F32 accumulators do it. For a
    /// device whose half arithmetic is slower than its conversions.
    Widened,
    /// As a device that has the half dtype would compute: the result of each operation in half is
    /// on the grid of half numbers, held in F32, and so is its gradient.
    Emulated,
}

/// Rules for the precision of an execution.
pub trait Rules {
    /// What is done with the float operands of an operation.
    fn precision(&self, node: &Node<'_>) -> Precision;

    /// The dtype of [`Precision::Half`].
    fn half(&self) -> FloatDType;

    /// How the device computes in it.
    fn arithmetic(&self) -> Arithmetic {
        Arithmetic::Native
    }

    /// Whether the device, which computes in the half dtype by itself, adds up in it in this operation, and
    /// loses terms or leaves the range: where its operands are in half it runs in F32 on them, then.
    /// [`Node::rounding_error`] finds out.
    fn adds_up_in_half(&self, _node: &Node<'_>) -> bool {
        false
    }

    /// Whether somebody asks for F32 here, in the model or by the rules, instead of what they say by themselves:
    /// then the backward pass reads in F32, too. Default: what the [model](Node::is_full) asks for.
    fn asks_for_full(&self, node: &Node<'_>) -> bool {
        node.is_full()
    }

    /// A number that rules of this type share only where they come to the same for every graph: precisions,
    /// half dtype, arithmetic, [`adds_up_in_half`](Self::adds_up_in_half),
    /// [`asks_for_full`](Self::asks_for_full). A recording that is kept decides
    /// them once for it. Default: none, and in each execution.
    fn key(&self) -> Option<u64> {
        None
    }

    /// What float results are cast to; `None` leaves them as they are.
    fn results(&self) -> Option<FloatDType> {
        None
    }
}

/// Every operation in the dtypes in which it was recorded.
#[derive(Debug, Clone, Copy, Default)]
pub struct AsRecorded;

impl Rules for AsRecorded {
    fn precision(&self, _node: &Node<'_>) -> Precision {
        Precision::AsRecorded
    }

    fn half(&self) -> FloatDType {
        FloatDType::F32
    }

    fn key(&self) -> Option<u64> {
        Some(0)
    }
}

/// What the rules come to for one operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Assignment {
    /// The rule.
    pub precision: Precision,
    /// What its float operands are cast to; `None` leaves them as they come.
    pub operands: Option<FloatDType>,
    /// The dtype of its float results, if it has any.
    pub results: Option<DType>,
    /// It runs in F32 on operands in half, since the device would [add up in half](Rules::adds_up_in_half).
    pub widened: bool,
}

/// Whether `reader` adds what `made` gives to the logits of an attention: numbers there may be some that no half
/// dtype has.
fn takes_as_bias(reader: &Node<'_>, made: Node<'_>) -> bool {
    let OperationIr::Module(ModuleOperationIr::Attention(attention)) = reader.operation() else {
        return false;
    };
    let bias = attention.attn_bias.as_ref();
    let mut outputs = made.operation().outputs();
    bias.is_some_and(|bias| outputs.any(|tensor| tensor.id == bias.id))
}

/// Whether rules may cast a tensor of this dtype: F32 and half, not F64 and what is quantized.
pub fn is_castable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::Flex32 | DType::F16 | DType::BF16)
}

impl Graph {
    /// What `rules` come to: for each operation the dtypes that it would run in, without running
    /// it. Parameters and inputs are in the dtypes that they had when they were recorded.
    pub fn assign(&self, rules: &impl Rules) -> Vec<Assignment> {
        let mut precisions: Vec<Precision> = self
            .nodes()
            .map(|node| match node.hook() {
                // A hook takes what comes, and gives it back in its dtype.
                Some(_) => Precision::Widest,
                None => rules.precision(&node),
            })
            .collect();
        for index in (0..precisions.len()).rev() {
            if precisions[index] == Precision::Follow {
                let full = self.is_read_by(self.node(index), |reader| {
                    precisions[reader.index()] == Precision::Full
                });
                precisions[index] = match full {
                    true => Precision::Full,
                    false => Precision::Widest,
                };
            }
        }
        self.cast_before_moves(&mut precisions, rules.arithmetic());
        let mut dtypes: HashMap<TensorId, DType> = self.stored.clone();
        let mut assigned: Vec<Assignment> = self
            .nodes()
            .map(|node| self.assign_one(rules, node, &precisions, &mut dtypes))
            .collect();
        self.keep_wide(&mut assigned, rules.arithmetic());
        assigned
    }

    /// What is only moved, or cut off at zero, on its way to readers in half is cast before: the
    /// numbers are the same, and what is kept for the backward pass is half. Not where gradients are added.
    fn cast_before_moves(&self, precisions: &mut [Precision], arithmetic: Arithmetic) {
        let of_parameters = match arithmetic {
            Arithmetic::Native => self.computed_from_parameters(),
            Arithmetic::Widened | Arithmetic::Emulated => HashSet::default(),
        };
        for index in (0..precisions.len()).rev() {
            let node = self.node(index);
            let in_half = |reader: &Node<'_>| {
                precisions[reader.index()] == Precision::Half && !takes_as_bias(reader, node)
            };
            if precisions[index] == Precision::Widest
                && node.hook().is_none()
                && node.moves()
                && !self.adds_gradients(node, arithmetic, &of_parameters)
                && self.is_read_by(node, in_half)
            {
                precisions[index] = Precision::Half;
            }
        }
    }

    /// What comes of parameters and constants alone.
    fn computed_from_parameters(&self) -> HashSet<TensorId> {
        let parameters = self.parameters.iter().map(|parameter| parameter.tensor);
        let mut known: HashSet<TensorId> =
            parameters.chain(self.constants.keys().copied()).collect();
        for operation in &self.operations {
            let mut inputs = operation.inputs().peekable();
            if inputs.peek().is_some() && inputs.all(|tensor| known.contains(&tensor.id)) {
                known.extend(operation.outputs().map(|tensor| tensor.id));
            }
        }
        known
    }

    /// Whether its backward pass adds up any number of gradients in the dtype of its operand, or many come to
    /// its result: it looks up places; or the device adds in half itself, and its windows overlap, or it moves
    /// parameters, or what is computed from them, once for all that read it.
    fn adds_gradients(
        &self,
        node: Node<'_>,
        arithmetic: Arithmetic,
        of_parameters: &HashSet<TensorId>,
    ) -> bool {
        if node.looks_up() || arithmetic != Arithmetic::Native {
            return node.looks_up();
        }
        if let OperationIr::BaseFloat(BaseOperationIr::Unfold(windows)) = node.operation()
            && windows.size > windows.step
        {
            return true;
        }
        // What it repeats would be cast at its full size.
        let elements = |tensor: &TensorIr| tensor.shape.num_elements();
        let made = node.operation().outputs().next();
        let repeats = match (node.moved(), made) {
            (Some(from), Some(to)) => elements(to) > elements(from),
            _ => false,
        };
        let is_shared = node.readers().nth(1).is_some();
        is_shared && !repeats && made.is_some_and(|made| of_parameters.contains(&made.id))
    }

    /// The result of a product that is computed in F32 anyway is not rounded for readers in F32.
    fn keep_wide(&self, assigned: &mut [Assignment], arithmetic: Arithmetic) {
        for index in 0..assigned.len() {
            let node = self.node(index);
            let is_wide = arithmetic == Arithmetic::Widened || assigned[index].widened;
            if is_wide
                && (assigned[index].precision == Precision::Half || assigned[index].widened)
                && !node.moves()
                && self.is_read_by(node, |reader| {
                    assigned[reader.index()].operands == Some(FloatDType::F32)
                })
            {
                assigned[index].results = assigned[index].results.map(|_| DType::F32);
            }
        }
    }

    /// Whether it gives a softmax, computed in F32, that products in half alone read, also behind a
    /// dropout: of its results the rounded ones are kept for them, and enough for its own gradient.
    fn gives_probabilities(
        &self,
        node: Node<'_>,
        precisions: &[Precision],
        dtypes: &HashMap<TensorId, DType>,
    ) -> bool {
        let Some(composite) = self.composites.ending_at(node.index()) else {
            return false;
        };
        let is_f32 = |index: &usize| {
            let mut made = self.operations[*index].outputs();
            made.all(|tensor| dtypes.get(&tensor.id) == Some(&DType::F32))
        };
        let is_product = |reader: &Node<'_>| precisions[reader.index()] == Precision::Half;
        // A dropout is a mask and a factor.
        let is_dropout = |reader: &Node<'_>| {
            reader.masked().is_some()
                && self.is_read_by(*reader, |next| {
                    is_product(next)
                        || next.name() == "mul_scalar" && self.is_read_by(*next, is_product)
                })
        };
        matches!(composite.kind, CompositeKind::Softmax { .. })
            && precisions[node.index()] == Precision::Full
            && composite.inner.iter().all(is_f32)
            && self.is_read_by(node, |reader| is_product(reader) || is_dropout(reader))
    }

    /// Whether something reads the results of an operation, and all that does is of a kind.
    fn is_read_by(&self, node: Node<'_>, kind: impl Fn(&Node<'_>) -> bool) -> bool {
        let mut made = node.operation().outputs();
        let is_result = made.any(|tensor| self.results.contains(&tensor.id));
        let mut readers = node.readers().peekable();
        !is_result && readers.peek().is_some() && readers.all(|reader| kind(&reader))
    }

    fn assign_one(
        &self,
        rules: &impl Rules,
        node: Node<'_>,
        precisions: &[Precision],
        dtypes: &mut HashMap<TensorId, DType>,
    ) -> Assignment {
        let operation = node.operation();
        let precision = precisions[node.index()];
        let found: Vec<DType> = operation
            .inputs()
            .map(|tensor| dtypes.get(&tensor.id).copied().unwrap_or(tensor.dtype))
            .filter(DType::is_float)
            .collect();
        let precision = match found.iter().all(|dtype| is_castable(*dtype)) {
            true => precision,
            false => Precision::AsRecorded,
        };
        let mixed = found.windows(2).any(|pair| pair[0] != pair[1]);
        let operands = match precision {
            _ if found.is_empty() => None,
            Precision::Half => Some(rules.half()),
            Precision::Full => Some(FloatDType::F32),
            Precision::Widest | Precision::Follow => mixed.then_some(FloatDType::F32),
            Precision::AsRecorded => None,
        };
        let half = rules.half();
        let reads_half = operands.map_or(found.first() == Some(&half.into()), |to| to == half);
        let widened = reads_half
            && matches!(half, FloatDType::F16 | FloatDType::BF16)
            && rules.arithmetic() == Arithmetic::Native
            && rules.adds_up_in_half(&node);
        let operands = if widened { Some(half) } else { operands };
        let is_cast = matches!(operation, OperationIr::BaseFloat(BaseOperationIr::Cast(_)));
        let rounds = operands == Some(FloatDType::F32)
            && rules.arithmetic() != Arithmetic::Emulated
            && self.gives_probabilities(node, precisions, dtypes);
        let mut results = None;
        for output in operation.outputs().filter(|tensor| tensor.dtype.is_float()) {
            let dtype = match (operands, found.first()) {
                _ if is_cast => output.dtype,
                _ if rounds => rules.half().into(),
                (Some(dtype), _) => dtype.into(),
                (None, Some(dtype)) => *dtype,
                (None, None) => output.dtype,
            };
            dtypes.insert(output.id, dtype);
            results = Some(dtype);
        }
        if let Some(norm) = self.batch_norm(operation) {
            for statistic in [&norm.mean, &norm.variance] {
                dtypes.insert(statistic.id, results.unwrap_or(DType::F32));
            }
        }
        Assignment {
            precision,
            operands,
            results,
            widened,
        }
    }
}
