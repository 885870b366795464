//! From recordings with other sizes to what each size is, operation by operation.

use burn::backend::ir::{
    BaseOperationIr, InterpolateModeIr, ModuleOperationIr, NumericOperationIr, OperationIr,
    SliceOpIr, TensorId, TensorIr,
};
use burn::tensor::TensorData;
use burn_lean_graph::{Graph, LoopPart, Node};

use super::probe::{Sample, made_on_the_host, whole_numbers};
use super::sizes::{Number, Size};
use super::{Open, OpenAxis};
use crate::export::lower::{is_exact, module_of};

const COMPUTES: &str = "computes with its size";

/// What all sizes are, in terms of these axes. The first of the samples is the exported recording.
///
/// The error says which operation needs a size that nothing tells.
pub(super) fn analyse(
    graph: &Graph,
    axes: &[&OpenAxis],
    samples: &[&Sample],
) -> Result<Open, String> {
    let mut analysis = Analysis {
        graph,
        samples,
        is_in_loop: false,
        open: Open::default(),
    };
    for axis in axes {
        let (input, along) = axis.axes[0];
        let id = graph.inputs()[input];
        let values = analysis.values(id, along);
        let known = &mut analysis.open.known;
        known.name(axis.name.clone(), values, id, along);
    }
    for id in graph.inputs() {
        analysis.given(*id)?;
    }
    for node in graph.nodes() {
        analysis.node(node)?;
    }
    for id in graph.outputs() {
        if !analysis.open.sizes.contains_key(id) {
            analysis.given(*id)?;
        }
    }
    Ok(analysis.open)
}

struct Analysis<'a> {
    graph: &'a Graph,
    samples: &'a [&'a Sample],
    /// Whether a loop has begun and not ended.
    is_in_loop: bool,
    open: Open,
}

impl Analysis<'_> {
    /// The size of a tensor along an axis, in each sample.
    fn values(&self, id: TensorId, axis: usize) -> Vec<usize> {
        let own = &self.samples[0].shapes[&id];
        let of = |sample: &&Sample| sample.shapes.get(&id).unwrap_or(own)[axis];
        self.samples.iter().map(of).collect()
    }

    fn explained(&mut self, id: TensorId, axis: usize) -> Option<Size> {
        let values = self.values(id, axis);
        self.open.known.explain(&values)
    }

    /// How many sizes of a tensor nothing before it tells.
    fn unexplained(&mut self, tensor: &TensorIr) -> usize {
        let axes = 0..tensor.shape.num_dims();
        axes.filter(|axis| self.explained(tensor.id, *axis).is_none())
            .count()
    }

    /// An input, a parameter or a constant.
    fn given(&mut self, id: TensorId) -> Result<(), String> {
        let graph = self.graph;
        let constant = graph.constants().find(|(other, _)| *other == id);
        let mut samples = self.samples.iter();
        if let (true, Some((_, data))) = (
            samples.any(|sample| sample.counted.contains_key(&id)),
            constant,
        ) {
            let counted = self.counted(id, data);
            let counted = counted.ok_or_else(|| made_on_the_host(graph, id, data))?;
            self.open.counted.insert(id, counted);
        }
        let rank = self.samples[0].shapes[&id].len();
        let sizes: Option<Vec<Size>> = (0..rank).map(|axis| self.explained(id, axis)).collect();
        let why = || match constant {
            Some((_, data)) => made_on_the_host(graph, id, data),
            None => "a parameter has another shape".into(),
        };
        self.open.sizes.insert(id, sizes.ok_or_else(why)?);
        Ok(())
    }

    /// First number and step of a list that is a count in each recording.
    fn counted(&mut self, id: TensorId, data: &TensorData) -> Option<(Number, i64)> {
        let own = whole_numbers(data)?;
        let of = |sample: &&Sample| sample.counted.get(&id).unwrap_or(&own).clone();
        let lists: Vec<Vec<i64>> = self.samples.iter().map(of).collect();
        let step = step(&lists)?;
        let mut firsts: Vec<Option<i64>> = lists.iter().map(|list| list.first().copied()).collect();
        // Of none there is none, which is as good as the first of the others where they have one.
        let same = firsts.iter().flatten().next().copied()?;
        if firsts.iter().flatten().all(|first| *first == same) {
            firsts = vec![Some(same); lists.len()];
        }
        let firsts = firsts.into_iter().collect::<Option<Vec<i64>>>()?;
        Some((self.open.known.number(&firsts)?, step))
    }

    fn node(&mut self, node: Node<'_>) -> Result<(), String> {
        let operation = node.operation();
        for input in operation.inputs() {
            if !self.open.sizes.contains_key(&input.id) {
                self.given(input.id)?;
            }
        }
        self.needs(node).map_err(|why| {
            let module = module_of(self.graph, node);
            format!("`{}` of {module} {why}", node.name())
        })?;
        // How many steps there are is known before the loop.
        match LoopPart::of(operation) {
            Some(LoopPart::Begin { .. }) => self.is_in_loop = true,
            Some(LoopPart::End { .. }) => self.is_in_loop = false,
            _ => {}
        }
        for out in operation.outputs() {
            let mut sizes = Vec::with_capacity(out.shape.num_dims());
            for axis in 0..out.shape.num_dims() {
                let values = self.values(out.id, axis);
                let known = &mut self.open.known;
                sizes.push(match known.explain(&values) {
                    Some(size) => size,
                    None if self.is_in_loop => {
                        let (name, module) = (node.name(), module_of(self.graph, node));
                        return Err(format!("`{name}` of {module}, in a loop, {COMPUTES}"));
                    }
                    None => known.computed(values, out.id, axis),
                });
            }
            self.open.sizes.insert(out.id, sizes);
        }
        Ok(())
    }

    /// The number that an operation has, where it is another one in some of the recordings.
    fn scalar(&mut self, node: Node<'_>) -> Result<(), &'static str> {
        let at = node.index();
        let Some(own) = self.samples[0].scalars.get(&at) else {
            return Ok(());
        };
        let of = |sample: &&Sample| *sample.scalars.get(&at).unwrap_or(own);
        let values: Vec<i64> = self.samples.iter().map(of).collect();
        match self.open.known.number(&values).ok_or(COMPUTES)? {
            Number::Fixed(_) => {}
            number => {
                let results = node.operation().outputs().map(|out| out.id);
                let numbers = results.map(|id| (id, number.clone()));
                self.open.scalars.extend(numbers);
            }
        }
        Ok(())
    }

    /// Whether a file can tell the sizes that it has to give this operation.
    fn needs(&mut self, node: Node<'_>) -> Result<(), &'static str> {
        use BaseOperationIr::*;
        self.scalar(node)?;
        if let Some(LoopPart::Take { .. }) = LoopPart::of(node.operation()) {
            return self.numbers(node).map(drop);
        }
        match node.operation() {
            OperationIr::BaseFloat(base)
            | OperationIr::BaseInt(base)
            | OperationIr::BaseBool(base) => match base {
                // One is found by itself.
                Reshape(o) => self.at_most(&o.out, 1),
                Expand(o) => self.at_most(&o.out, 0),
                Empty(o) | Zeros(o) | Ones(o) => self.at_most(&o.out, 0),
                RepeatDim(_) => self.numbers(node).map(drop),
                Slice(o) => self.slice(node, o),
                SliceAssign(o) => {
                    let numbers = self.numbers(node)?;
                    let sizes = &self.open.sizes[&o.tensor.id];
                    let mut bounds = numbers.as_chunks::<2>().0.iter().zip(sizes);
                    let is_known = bounds.all(|([start, end], size)| {
                        let is_whole = *start == Size::Fixed(0) && end == size;
                        is_whole || !(start.is_open() || end.is_open())
                    });
                    is_known.then_some(()).ok_or(COMPUTES)
                }
                _ => Ok(()),
            },
            OperationIr::NumericFloat(_, NumericOperationIr::Full(o))
            | OperationIr::NumericInt(_, NumericOperationIr::Full(o)) => self.at_most(&o.out, 0),
            OperationIr::Module(module) => self.module(module),
            _ => Ok(()),
        }
    }

    fn at_most(&mut self, out: &TensorIr, unexplained: usize) -> Result<(), &'static str> {
        match self.unexplained(out) <= unexplained {
            true => Ok(()),
            false => Err(COMPUTES),
        }
    }

    /// The sizes that an operation has as numbers.
    fn numbers(&mut self, node: Node<'_>) -> Result<Vec<Size>, &'static str> {
        let at = node.index();
        let own = &self.samples[0].numbers[&at];
        let mut sizes = Vec::with_capacity(own.len());
        for place in 0..own.len() {
            let of = |sample: &&Sample| sample.numbers.get(&at).unwrap_or(own)[place];
            let values: Vec<usize> = self.samples.iter().map(of).collect();
            sizes.push(self.open.known.explain(&values).ok_or(COMPUTES)?);
        }
        self.open.numbers.insert(at, sizes.clone());
        Ok(sizes)
    }

    fn slice(&mut self, node: Node<'_>, o: &SliceOpIr) -> Result<(), &'static str> {
        let numbers = self.numbers(node)?;
        let mut bounds = o.ranges.iter().zip(numbers.as_chunks::<2>().0);
        let goes_back =
            bounds.any(|(range, bounds)| range.step < 0 && bounds.iter().any(Size::is_open));
        match goes_back {
            true => Err("goes back along it: flip it instead"),
            false => Ok(()),
        }
    }

    fn module(&mut self, module: &ModuleOperationIr) -> Result<(), &'static str> {
        use ModuleOperationIr::*;
        match module {
            // The rows of a quantized table are given their shape.
            Embedding(o) => self.at_most(&o.out, 1),
            // Without a scale of its own it is 1/√ of the last size, which the file has as a number.
            Attention(o) => {
                let sizes = &self.open.sizes[&o.query.id];
                let is_scaled = o.options.scale.is_some();
                match is_scaled || !sizes.last().is_some_and(Size::is_open) {
                    true => Ok(()),
                    false => Err("scales by a size of it: give `scale`"),
                }
            }
            AdaptiveAvgPool1d(o) => self.windows(&o.x, &[o.output_size]),
            AdaptiveAvgPool2d(o) => self.windows(&o.x, &o.output_size),
            AdaptiveAvgPool3d(o) => self.windows(&o.x, &o.output_size),
            Interpolate(o) => {
                self.at_most(&o.out, 0)?;
                let pairs = |axis| self.values(o.x.id, axis).into_iter();
                let both = |axis| pairs(axis).zip(self.values(o.out.id, axis));
                let is_open = |axis: usize| self.open.sizes[&o.x.id][axis].is_open();
                let nearest = o.options.mode == InterpolateModeIr::Nearest;
                let exact = || [2, 3].into_iter().flat_map(both).all(is_exact);
                match nearest && [2, 3].into_iter().any(is_open) && !exact() {
                    true => Err("takes the nearest of sizes that are no power of two apart"),
                    false => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// The file has the sizes of the windows of an adaptive pooling.
    fn windows(&self, x: &TensorIr, size: &[usize]) -> Result<(), &'static str> {
        let are_windows = size.iter().any(|size| *size != 1);
        let sizes = self.open.sizes[&x.id].iter();
        match are_windows && sizes.skip(2).any(Size::is_open) {
            true => Err("has windows of a part of it"),
            false => Ok(()),
        }
    }
}

/// The step of counts that are as long as they like, each from a number of its own.
fn step(lists: &[Vec<i64>]) -> Option<i64> {
    let mut pairs = lists.iter().filter_map(|list| match &list[..] {
        [first, second, ..] => Some(second.checked_sub(*first)),
        _ => None,
    });
    // What is at most one number long takes no step.
    let step = pairs.next().unwrap_or(Some(1))?;
    let is_counted = |list: &Vec<i64>| {
        let steps = list.windows(2);
        steps
            .into_iter()
            .all(|two| two[1].checked_sub(two[0]) == Some(step))
    };
    lists.iter().all(is_counted).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::step;

    #[test]
    fn counts_of_other_lengths_and_beginnings_have_one_step() {
        let of = |a: &[i64], b: &[i64]| step(&[a.to_vec(), b.to_vec()]);
        assert_eq!(of(&[0], &[0, 1, 2]), Some(1));
        assert_eq!(of(&[3, 1], &[3, 1, -1]), Some(-2));
        assert_eq!(of(&[], &[5, 7]), Some(2));
        assert_eq!(of(&[4], &[6]), Some(1));
        assert_eq!(of(&[1, 0], &[2, 1, 0]), Some(-1));
        assert_eq!(of(&[0, 1], &[0, 2]), None);
        assert_eq!(of(&[0, 1, 3], &[0, 1]), None);
    }
}
