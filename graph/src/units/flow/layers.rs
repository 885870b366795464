//! Places through products and layers: which weights read them, and which make them.

use burn::backend::ir::{ModuleOperationIr as Module, TensorIr};

use super::{Axes, Flow};
use crate::units::{FixedBy, UnitRole};

impl Flow<'_> {
    /// Sums over the last axis of `lhs` and the last but one of `rhs`.
    pub(super) fn matmul(&mut self, lhs: &TensorIr, rhs: &TensorIr, out: &TensorIr) -> Option<()> {
        let (mut left, right) = (self.of(lhs), self.of(rhs));
        let last = left.len().checked_sub(1).filter(|last| *last > 0)?;
        let (read, summed) = (&left[last], &right[last - 1]);
        self.classes.join_all(read, summed);
        let are_weights = [lhs, rhs].map(|one| self.weights.contains(&one.id));
        match are_weights {
            [false, true] => {
                self.classes.play(summed, UnitRole::Reads);
                self.classes.play(&right[last], UnitRole::Makes);
            }
            [true, false] => {
                self.classes.play(read, UnitRole::Reads);
                self.classes.play(&left[last - 1], UnitRole::Makes);
            }
            _ => {
                self.classes.fix(read, &FixedBy::Attention);
                // What is weighted by something that depends on the inputs does, too.
                if !self.is_derived(rhs) {
                    self.classes.vary(&left[last - 1]);
                }
                if !self.is_derived(lhs) {
                    self.classes.vary(&right[last]);
                }
            }
        }
        for axis in 0..last - 1 {
            let (a, b) = (&left[axis], &right[axis]);
            if a.len() == b.len() {
                self.classes.join_all(a, b);
                // A head, of what is weighted by something that depends on the inputs.
                if are_weights == [false, false] {
                    self.classes.vary(a);
                }
                continue;
            }
            let (long, spread) = match a.len() < b.len() {
                true => (b.clone(), lhs),
                false => (a.clone(), rhs),
            };
            if !self.is_derived(spread) {
                self.classes.vary(&long);
            }
            left[axis] = long;
        }
        left[last] = right[last].clone();
        self.set(out, left);
        Some(())
    }

    /// A layer: places of the last axis (linear) or the second one (convolution) are read by one axis
    /// of the weight and made by another.
    fn layer(
        &mut self,
        [x, weight, out]: [&TensorIr; 3],
        bias: Option<&TensorIr>,
        axis: usize,
        [reads, makes]: [usize; 2],
        groups: usize,
    ) -> Option<()> {
        let (mut axes, own) = (self.of(x), self.of(weight));
        let made = match groups {
            1 => {
                self.classes.play(&own[reads], UnitRole::Reads);
                self.classes.play(&own[makes], UnitRole::Makes);
                self.classes.join_all(&axes[axis], &own[reads]);
                own[makes].clone()
            }
            _ => self.grouped(&axes[axis], &own[reads], &own[makes], groups),
        };
        if let Some(bias) = bias {
            let places = self.of(bias);
            self.classes.join_all(&made, &places[0]);
        }
        for (at, places) in axes.iter_mut().enumerate() {
            if at == axis {
                *places = made.clone();
            } else if places.len() != out.shape[at] || axis == 1 && at > 1 {
                self.classes.fix(places, &FixedBy::Operation("a window"));
                *places = self.positions(out.shape[at]);
            }
        }
        self.set(out, axes);
        Some(())
    }

    /// A convolution with groups: of the two axes of its weight one has the channels of all groups, the
    /// other those of one. Returns the places of what is made.
    fn grouped(&mut self, x: &[u32], reads: &[u32], makes: &[u32], groups: usize) -> Vec<u32> {
        let spread_over = |one: &[u32]| one.repeat(groups);
        // Those of a transposed convolution are read by the long axis.
        let is_transposed = reads.len() == x.len();
        let (long, short) = match is_transposed {
            true => (reads, makes),
            false => (makes, reads),
        };
        let made = match is_transposed {
            true => spread_over(makes),
            false => makes.to_vec(),
        };
        if short.len() > 1 {
            // The same places of all groups go: their number stays.
            let of_group = long.len() / groups;
            for (place, id) in long.iter().enumerate() {
                self.classes.join(*id, long[place % of_group]);
            }
            self.classes.play(reads, UnitRole::Reads);
            self.classes.play(makes, UnitRole::Makes);
            let read = match is_transposed {
                true => reads.to_vec(),
                false => spread_over(reads),
            };
            self.classes.join_all(x, &read);
            return made;
        }
        if self.splits.is_none() {
            for places in [x, reads, makes] {
                self.classes.fix(places, &FixedBy::Groups);
            }
            return made;
        }
        // Depthwise: a channel is a group, and the weight has a slice for it, as a norm has.
        let of_group = long.len() / groups;
        let channel = |group: usize| long[group * of_group];
        for (place, id) in long.iter().enumerate() {
            self.classes.join(*id, channel(place / of_group));
        }
        let inputs = x.len() / groups;
        for (place, id) in x.iter().enumerate() {
            self.classes.join(*id, channel(place / inputs));
        }
        let outputs = made.len() / groups;
        (0..made.len())
            .map(|place| channel(place / outputs))
            .collect()
    }

    /// What keeps examples and channels, and looks at windows of the rest.
    fn windows(&mut self, x: &TensorIr, out: &TensorIr) -> Option<()> {
        let mut axes = self.of(x);
        for (places, size) in axes.iter_mut().zip(out.shape.iter()).skip(2) {
            self.classes.fix(places, &FixedBy::Operation("a window"));
            *places = self.positions(*size);
        }
        self.set(out, axes);
        Some(())
    }

    pub(super) fn module(&mut self, module: &Module) -> Option<()> {
        macro_rules! convolution {
            ($op:expr, $places:expr) => {
                self.layer(
                    [&$op.x, &$op.weight, &$op.out],
                    $op.bias.as_ref(),
                    1,
                    $places,
                    $op.options.groups,
                )
            };
        }
        match module {
            Module::Linear(op) => {
                let last = op.x.shape.num_dims() - 1;
                let places = [0, 1];
                self.layer(
                    [&op.x, &op.weight, &op.out],
                    op.bias.as_ref(),
                    last,
                    places,
                    1,
                )
            }
            Module::Conv1d(op) => convolution!(op, [1, 0]),
            Module::Conv2d(op) => convolution!(op, [1, 0]),
            Module::Conv3d(op) => convolution!(op, [1, 0]),
            Module::ConvTranspose1d(op) => convolution!(op, [0, 1]),
            Module::ConvTranspose2d(op) => convolution!(op, [0, 1]),
            Module::ConvTranspose3d(op) => convolution!(op, [0, 1]),
            Module::Embedding(op) => {
                let table = self.of(&op.weights);
                self.classes.fix(&table[0], &FixedBy::Input);
                self.classes.play(&table[1], UnitRole::Makes);
                let last = op.out.shape.num_dims() - 1;
                let mut axes: Axes = (0..last)
                    .map(|at| self.positions(op.out.shape[at]))
                    .collect();
                axes.push(table[1].clone());
                self.set(&op.out, axes);
                Some(())
            }
            Module::BatchNorm(op) => {
                let axes = self.of(&op.x);
                for parameter in [&op.gamma, &op.beta, &op.mean, &op.variance] {
                    let places = self.of(parameter);
                    self.classes.join_all(&axes[1], &places[0]);
                }
                self.set(&op.out, axes);
                Some(())
            }
            Module::LayerNorm(op) => {
                let axes = self.of(&op.input);
                let last = axes.last()?;
                self.classes.fix(last, &FixedBy::Reduction);
                for parameter in [Some(&op.gamma), op.beta.as_ref()].into_iter().flatten() {
                    let places = self.of(parameter);
                    self.classes.join_all(last, &places[0]);
                }
                self.set(&op.out, axes);
                Some(())
            }
            Module::AvgPool1d(op) => self.windows(&op.x, &op.out),
            Module::AvgPool2d(op) => self.windows(&op.x, &op.out),
            Module::AdaptiveAvgPool1d(op) => self.windows(&op.x, &op.out),
            Module::AdaptiveAvgPool2d(op) => self.windows(&op.x, &op.out),
            Module::AdaptiveAvgPool3d(op) => self.windows(&op.x, &op.out),
            Module::MaxPool1d(op) => self.windows(&op.x, &op.out),
            Module::MaxPool2d(op) => self.windows(&op.x, &op.out),
            Module::Interpolate(op) => self.windows(&op.x, &op.out),
            Module::Attention(op) => {
                let heads = self.of(&op.query)[1].clone();
                let operands = [&op.query, &op.key, &op.value];
                for operand in operands.into_iter().chain(&op.mask).chain(&op.attn_bias) {
                    for (axis, places) in self.of(operand).iter().enumerate() {
                        match axis == 1 && places.len() == heads.len() {
                            true => self.classes.join_all(&heads, places),
                            false => self.classes.fix(places, &FixedBy::Attention),
                        }
                    }
                }
                self.classes.vary(&heads);
                let sizes = op.out.shape.iter();
                let axes = sizes.map(|n| self.classes.pinned(*n, FixedBy::Attention));
                let mut axes: Axes = axes.collect();
                axes[1] = heads;
                self.set(&op.out, axes);
                Some(())
            }
            _ => None,
        }
    }
}
