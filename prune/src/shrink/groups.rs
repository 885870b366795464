//! Which units of a recorded network go together: the channels of layers, through normalizations,
//! activations, pooling, reshapes and residual sums, to whoever reads them.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{
    ActivationOperationIr, BaseOperationIr, BinaryOpIr, FloatOperationIr, ModuleOperationIr,
    NumericOperationIr, OperationIr, TensorId, TensorIr,
};
use burn_lean_graph::{Graph, Node};

/// Units that stay or go together.
#[derive(Debug, Default)]
pub(super) struct Group {
    pub(super) units: usize,
    /// Weights that make them, and the axis of the units there.
    pub(super) makers: Vec<Slice>,
    /// Vectors with a number for each: biases, gains, running statistics.
    pub(super) vectors: Vec<Slice>,
    /// Weights that read them.
    pub(super) readers: Vec<Reader>,
    /// Why they stay as they are.
    pub(super) blocked: Option<String>,
}

/// An axis of a parameter, `positions` neighbours for each unit.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Slice {
    pub(super) path: String,
    pub(super) axis: usize,
    pub(super) positions: usize,
}

#[derive(Debug)]
pub(super) struct Reader {
    pub(super) slice: Slice,
    /// What each unit is at its input, where it is always the same number.
    pub(super) constants: Vec<Option<f32>>,
}

/// Where the units of a group are in a tensor.
#[derive(Debug, Clone)]
struct Units {
    group: usize,
    axis: usize,
    positions: usize,
    constants: Vec<Option<f32>>,
}

/// The groups of a network, by the values of its parameters.
pub(super) fn groups(graph: &Graph, values: &HashMap<String, Vec<f32>>) -> Vec<Group> {
    let mut finder = Finder {
        values,
        groups: Vec::new(),
        parents: Vec::new(),
        of: HashMap::new(),
        parameters: HashMap::new(),
        claimed: HashMap::new(),
        untouchable: HashSet::new(),
    };
    for parameter in graph.parameters() {
        let known = (parameter.path.clone(), parameter.shape.clone());
        finder.parameters.insert(parameter.tensor, known);
    }
    for node in graph.nodes() {
        finder.follow(node);
    }
    for output in graph.outputs() {
        finder.block_tensor(*output, "they are a result");
    }
    finder.finish()
}

struct Finder<'a> {
    values: &'a HashMap<String, Vec<f32>>,
    groups: Vec<Group>,
    /// A group that was joined to another one.
    parents: Vec<usize>,
    of: HashMap<TensorId, Units>,
    /// Path and shape of parameters, and of what has the same numbers in the same order.
    parameters: HashMap<TensorId, (String, Vec<usize>)>,
    /// The group of an axis of a parameter.
    claimed: HashMap<(String, usize), usize>,
    /// Parameters that something else reads, too.
    untouchable: HashSet<String>,
}

impl Finder<'_> {
    fn finish(mut self) -> Vec<Group> {
        for ((path, _), group) in std::mem::take(&mut self.claimed) {
            if self.untouchable.contains(&path) {
                self.block(group, format!("`{path}` is also read by another operation"));
            }
        }
        let mut groups: Vec<Group> = self.groups;
        for (index, parent) in self.parents.iter().enumerate().rev() {
            if *parent != index {
                let joined = std::mem::take(&mut groups[index]);
                let group = &mut groups[*parent];
                group.makers.extend(joined.makers);
                group.vectors.extend(joined.vectors);
                group.readers.extend(joined.readers);
                group.blocked = group.blocked.take().or(joined.blocked);
            }
        }
        for group in groups.iter_mut().filter(|group| group.units > 0) {
            if group.readers.is_empty() && group.blocked.is_none() {
                group.blocked = Some("no layer reads them".into());
            }
        }
        groups.into_iter().filter(|group| group.units > 0).collect()
    }

    fn root(&self, mut group: usize) -> usize {
        while self.parents[group] != group {
            group = self.parents[group];
        }
        group
    }

    fn block(&mut self, group: usize, reason: impl Into<String>) {
        let root = self.root(group);
        self.groups[root]
            .blocked
            .get_or_insert_with(|| reason.into());
    }

    fn block_tensor(&mut self, tensor: TensorId, reason: &str) {
        if let Some(units) = self.of.remove(&tensor) {
            self.block(units.group, reason);
        }
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.root(a), self.root(b));
        let (low, high) = (a.min(b), a.max(b));
        if low != high {
            self.parents[high] = low;
            if let Some(reason) = self.groups[high].blocked.take() {
                self.block(low, reason);
            }
        }
    }

    /// The group takes an axis of a parameter.
    fn claim(&mut self, group: usize, slice: &Slice) {
        let key = (slice.path.clone(), slice.axis);
        if let Some(other) = self.claimed.insert(key, group) {
            let reason = format!("`{}` is used twice", slice.path);
            self.block(other, reason.clone());
            self.block(group, reason);
        }
    }

    fn follow(&mut self, node: Node<'_>) {
        use ModuleOperationIr as Module;
        use NumericOperationIr as Numeric;
        let operation = node.operation();
        match operation {
            OperationIr::Module(Module::Linear(op)) => {
                self.product(&op.x, &op.weight, op.bias.as_ref(), &op.out, None);
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(op)) => {
                self.product(&op.lhs, &op.rhs, None, &op.out, None);
            }
            OperationIr::Module(Module::Conv1d(op)) => {
                let groups = Some(op.options.groups);
                self.product(&op.x, &op.weight, op.bias.as_ref(), &op.out, groups);
            }
            OperationIr::Module(Module::Conv2d(op)) => {
                let groups = Some(op.options.groups);
                self.product(&op.x, &op.weight, op.bias.as_ref(), &op.out, groups);
            }
            OperationIr::Module(Module::BatchNorm(op)) => {
                let vectors = [&op.gamma, &op.beta, &op.mean, &op.variance];
                let epsilon: f64 = op.epsilon.elem();
                self.normalization(&op.x, vectors, epsilon as f32, &op.out);
            }
            OperationIr::NumericFloat(_, Numeric::Add(op)) => self.binary(op, |a, b| a + b),
            OperationIr::NumericFloat(_, Numeric::Sub(op)) => self.binary(op, |a, b| a - b),
            OperationIr::NumericFloat(_, Numeric::Mul(op)) => self.binary(op, |a, b| a * b),
            OperationIr::NumericFloat(_, Numeric::Div(op)) => self.binary(op, |a, b| a / b),
            OperationIr::Activation(ActivationOperationIr::Relu(op)) => {
                self.pass(&op.input, &op.out, |x| Some(x.max(0.0)));
            }
            OperationIr::NumericFloat(_, Numeric::MeanDim(op)) => {
                self.reduce(&op.input, &op.out, op.axis);
            }
            OperationIr::NumericFloat(_, Numeric::SumDim(op)) => {
                self.reduce(&op.input, &op.out, op.axis);
            }
            OperationIr::BaseFloat(base) => self.moved(node, base),
            _ => match (keeps(node.name()), node.operands().next()) {
                (Some(zero_stays), Some(x)) => {
                    let x = x.clone();
                    let constant = |x: f32| (zero_stays && x == 0.0).then_some(0.0);
                    for out in operation.outputs() {
                        self.pass(&x, out, constant);
                    }
                }
                _ => self.other(node),
            },
        }
    }

    /// An operation that is not followed.
    fn other(&mut self, node: Node<'_>) {
        let reason = format!("`{}` is not followed", node.name());
        for input in node.operation().inputs() {
            if let Some(units) = self.of.get(&input.id) {
                let group = units.group;
                self.block(group, reason.clone());
            }
            if let Some((path, _)) = self.parameters.get(&input.id) {
                self.untouchable.insert(path.clone());
            }
        }
    }

    /// A product with a parameter: `groups` of a convolution.
    fn product(
        &mut self,
        x: &TensorIr,
        weight: &TensorIr,
        bias: Option<&TensorIr>,
        out: &TensorIr,
        groups: Option<usize>,
    ) {
        let of_bias = bias.map(|bias| self.parameters.get(&bias.id).cloned());
        let known = self.parameters.get(&weight.id).cloned();
        let (Some((path, shape)), true) = (known, of_bias != Some(None)) else {
            for tensor in [Some(x), Some(weight), bias].into_iter().flatten() {
                self.block_tensor(tensor.id, "a product of computed numbers is not followed");
            }
            return;
        };
        let is_matrix = groups.is_none();
        if is_matrix && shape.len() != 2 {
            self.untouchable.insert(path);
            self.block_tensor(x.id, "a product with more than a matrix is not followed");
            return;
        }
        let (input_axis, output_axis) = if is_matrix { (0, 1) } else { (1, 0) };
        let x_axis = if is_matrix { x.shape.num_dims() - 1 } else { 1 };
        let tied = groups.is_some_and(|groups| groups != 1);
        if let Some(units) = self.of.get(&x.id).cloned() {
            let slice = Slice {
                path: path.clone(),
                axis: input_axis,
                positions: units.positions,
            };
            self.claim(units.group, &slice);
            if units.axis != x_axis {
                self.block(units.group, format!("`{path}` sums over another axis"));
            } else if tied {
                self.block(units.group, format!("`{path}` has groups of channels"));
            } else {
                let root = self.root(units.group);
                self.groups[root].readers.push(Reader {
                    slice,
                    constants: units.constants,
                });
            }
        }
        let count = shape[output_axis];
        let group = self.groups.len();
        self.parents.push(group);
        let slice = Slice {
            path: path.clone(),
            axis: output_axis,
            positions: 1,
        };
        let mut constants = self.silent(&path, &shape, output_axis);
        self.groups.push(Group {
            units: count,
            makers: vec![slice.clone()],
            ..Group::default()
        });
        self.claim(group, &slice);
        if tied {
            self.block(group, format!("`{path}` has groups of channels"));
        }
        if let Some(Some((bias, _))) = of_bias {
            self.vector(group, &bias);
            let values = self.values.get(&bias);
            for (unit, constant) in constants.iter_mut().enumerate() {
                *constant = constant.and_then(|x| Some(x + values?.get(unit)?));
            }
        }
        let axis = if is_matrix {
            out.shape.num_dims() - 1
        } else {
            1
        };
        let units = Units {
            group,
            axis,
            positions: 1,
            constants,
        };
        self.of.insert(out.id, units);
    }

    /// 0 for each unit whose weights are all zero.
    fn silent(&self, path: &str, shape: &[usize], axis: usize) -> Vec<Option<f32>> {
        let mut found = vec![Some(0.0); shape[axis]];
        let inner: usize = shape[axis + 1..].iter().product();
        match self.values.get(path) {
            Some(values) => {
                for (index, value) in values.iter().enumerate() {
                    // A NaN is no zero either.
                    if *value != 0.0 {
                        found[index / inner % shape[axis]] = None;
                    }
                }
            }
            None => found.fill(None),
        }
        found
    }

    fn vector(&mut self, group: usize, path: &str) {
        let slice = Slice {
            path: path.to_string(),
            axis: 0,
            positions: 1,
        };
        self.claim(group, &slice);
        let root = self.root(group);
        self.groups[root].vectors.push(slice);
    }

    fn normalization(
        &mut self,
        x: &TensorIr,
        vectors: [&TensorIr; 4],
        epsilon: f32,
        out: &TensorIr,
    ) {
        let Some(mut units) = self.of.get(&x.id).cloned() else {
            return;
        };
        let paths: Vec<String> = vectors
            .iter()
            .filter_map(|vector| Some(self.parameters.get(&vector.id)?.0.clone()))
            .collect();
        if paths.len() != 4 || units.axis != 1 || units.positions != 1 {
            self.block(units.group, "a normalization is over another axis");
            return;
        }
        for path in &paths {
            self.vector(units.group, path);
        }
        let of = |which: usize, unit: usize| self.values.get(&paths[which])?.get(unit).copied();
        for (unit, constant) in units.constants.iter_mut().enumerate() {
            *constant = constant.and_then(|x| {
                let deviation = (of(3, unit)? + epsilon).sqrt();
                Some((x - of(2, unit)?) / deviation * of(0, unit)? + of(1, unit)?)
            });
        }
        self.of.insert(out.id, units);
    }

    fn binary(&mut self, op: &BinaryOpIr, compute: impl Fn(f32, f32) -> f32) {
        let (a, b) = (
            self.of.get(&op.lhs.id).cloned(),
            self.of.get(&op.rhs.id).cloned(),
        );
        let units = match (a, b) {
            (Some(a), Some(b)) => {
                let same = a.axis == b.axis
                    && a.positions == b.positions
                    && op.lhs.shape.num_dims() == op.rhs.shape.num_dims()
                    && op.lhs.shape[a.axis] == op.rhs.shape[b.axis];
                if !same {
                    let reason = "two kinds of units meet along other axes";
                    self.block(a.group, reason);
                    self.block(b.group, reason);
                    return;
                }
                self.join(a.group, b.group);
                let pairs = a.constants.iter().zip(&b.constants);
                let constants = pairs.map(|(a, b)| Some(compute((*a)?, (*b)?)));
                Units {
                    constants: constants.collect(),
                    ..a
                }
            }
            (Some(units), None) => {
                let other = |x, y| compute(x, y);
                match self.with_vector(units, &op.lhs, &op.rhs, other) {
                    Some(units) => units,
                    None => return,
                }
            }
            (None, Some(units)) => {
                let other = |x, y| compute(y, x);
                match self.with_vector(units, &op.rhs, &op.lhs, other) {
                    Some(units) => units,
                    None => return,
                }
            }
            (None, None) => {
                for side in [&op.lhs, &op.rhs] {
                    if let Some((path, _)) = self.parameters.get(&side.id) {
                        self.untouchable.insert(path.clone());
                    }
                }
                return;
            }
        };
        self.of.insert(op.out.id, units);
    }

    /// Units and something that has none: a number for each of them, or one for all.
    fn with_vector(
        &mut self,
        mut units: Units,
        x: &TensorIr,
        other: &TensorIr,
        compute: impl Fn(f32, f32) -> f32,
    ) -> Option<Units> {
        let known = self.parameters.get(&other.id).cloned();
        let rank = x.shape.num_dims();
        let aligned = other.shape.num_dims() == rank;
        if aligned && other.shape[units.axis] == 1 {
            // The same for all units of a place: no longer a constant.
            units.constants.fill(None);
            if let Some((path, _)) = known {
                self.untouchable.insert(path);
            }
            return Some(units);
        }
        let elements: usize = other.shape.iter().product();
        let count = units.constants.len();
        let is_vector = aligned
            && units.positions == 1
            && other.shape[units.axis] == count
            && elements == count;
        match known {
            Some((path, shape)) if is_vector && shape == [count] => {
                self.vector(units.group, &path);
                let values = self.values.get(&path);
                for (unit, constant) in units.constants.iter_mut().enumerate() {
                    *constant = constant.and_then(|x| Some(compute(x, *values?.get(unit)?)));
                }
                Some(units)
            }
            _ => {
                self.block(
                    units.group,
                    "a tensor that is no vector of theirs is added or multiplied",
                );
                None
            }
        }
    }

    /// An operation that keeps units apart.
    fn pass(&mut self, x: &TensorIr, out: &TensorIr, constant: impl Fn(f32) -> Option<f32>) {
        let Some(mut units) = self.of.get(&x.id).cloned() else {
            return;
        };
        if out.shape.num_dims() <= units.axis || out.shape[units.axis] != x.shape[units.axis] {
            self.block(units.group, "their number changes");
            return;
        }
        for one in &mut units.constants {
            *one = one.and_then(&constant);
        }
        self.of.insert(out.id, units);
    }

    fn reduce(&mut self, x: &TensorIr, out: &TensorIr, axis: usize) {
        match self.of.get(&x.id).map(|units| (units.group, units.axis)) {
            Some((group, of)) if of == axis => self.block(group, "they are averaged"),
            Some(_) => self.pass(x, out, |x| (x == 0.0).then_some(0.0)),
            None => {}
        }
    }

    fn moved(&mut self, node: Node<'_>, base: &BaseOperationIr) {
        use BaseOperationIr as Op;
        let (input, out) = match base {
            Op::Reshape(op) => (&op.input, &op.out),
            Op::SwapDims(op) => (&op.input, &op.out),
            Op::Permute(op) => (&op.input, &op.out),
            Op::Cast(op) => (&op.input, &op.out),
            _ => return self.other(node),
        };
        if let (Op::Reshape(_), Some(known)) = (base, self.parameters.get(&input.id).cloned()) {
            self.parameters.insert(out.id, known);
            return;
        }
        let Some(mut units) = self.of.get(&input.id).cloned() else {
            return self.other(node);
        };
        let axis = match base {
            Op::SwapDims(op) => Some(match units.axis {
                axis if axis == op.dim1 => op.dim2,
                axis if axis == op.dim2 => op.dim1,
                axis => axis,
            }),
            Op::Permute(op) => op.axes.iter().position(|from| *from == units.axis),
            Op::Reshape(_) => reshaped(&input.shape, &out.shape, units.axis).map(|(axis, more)| {
                units.positions *= more;
                axis
            }),
            _ => Some(units.axis),
        };
        match axis {
            Some(axis) => {
                units.axis = axis;
                self.of.insert(out.id, units);
            }
            None => self.block(units.group, "a reshape tears them apart"),
        }
    }
}

/// The axis after a reshape with the same numbers before it, of the same length, or joined with all
/// axes behind it; and by how much it is longer.
fn reshaped(from: &[usize], to: &[usize], axis: usize) -> Option<(usize, usize)> {
    let before: usize = from[..axis].iter().product();
    let behind: usize = from[axis + 1..].iter().product();
    let starts = |at: &usize| to[..*at].iter().product::<usize>() == before;
    let same = (0..to.len()).find(|at| starts(at) && to[*at] == from[axis]);
    let joined = || (0..to.len()).find(|at| starts(at) && to[*at] == from[axis] * behind);
    match same {
        Some(at) => Some((at, 1)),
        None => Some((joined()?, behind)),
    }
}

/// Whether an operation computes each number, or each place of a channel, by itself, and whether it
/// leaves channels of zeros at zero.
fn keeps(name: &str) -> Option<bool> {
    match name {
        "gelu"
        | "tanh"
        | "abs"
        | "sqrt"
        | "neg"
        | "erf"
        | "leaky_relu"
        | "mul_scalar"
        | "div_scalar"
        | "sin"
        | "sign"
        | "max_pool1d"
        | "max_pool2d"
        | "avg_pool1d"
        | "avg_pool2d"
        | "adaptive_avg_pool1d"
        | "adaptive_avg_pool2d" => Some(true),
        "sigmoid" | "hard_sigmoid" | "log_sigmoid" | "add_scalar" | "sub_scalar" | "exp"
        | "cos" | "recip" | "clamp" | "clamp_min" | "clamp_max" | "powf_scalar" => Some(false),
        _ => None,
    }
}
