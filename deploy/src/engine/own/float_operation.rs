//! Operations on floats that are no product with a packed weight: activations, norms, pooling, reshapes, products of
//! two activations.

use std::sync::Arc;

use burn_lean_kernels::{
    Epilogue, FloatMatrix, Rows, Storage, add, clamp, gelu, in_shares, sigmoid, tanh,
};

use super::pool::Pool;
use super::value::{Floats, Value, channels_last, extents, ordered};
use super::{failed, own, take};
use crate::DeployError;

/// An operation on floats.
#[derive(Debug, PartialEq)]
pub(super) enum FloatOperation {
    Clamp(f32, f32),
    Sigmoid,
    Tanh,
    Gelu,
    /// A factor and an addend, and what is below 0 or above 1 cut off.
    HardSigmoid(f32, f32),
    /// A factor for what is below 0.
    LeakyRelu(f32),
    /// Two operands, or one and a constant.
    Arithmetic(Arithmetic, Side),
    /// A factor and an addend for each index of the second axis.
    Affine(Vec<f32>, Vec<f32>),
    Reshape(Vec<i64>),
    Transpose(Vec<usize>),
    MatMul,
    /// Along the last axis.
    Softmax,
    /// Along the last axis: factor, addend, epsilon.
    LayerNorm(Vec<f32>, Option<Vec<f32>>, f32),
    /// Along all axes but the first two.
    MaxPool(Pool),
    /// Along an axis, which stays with one number or goes.
    Mean(usize, bool),
    /// Along all axes but the first two, which stay with one number each.
    GlobalMean,
    /// Several operands one after the other along an axis.
    Concat(usize),
    /// An axis, and what is taken of it.
    Slice(usize, i64, i64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arithmetic {
    Add,
    Subtract,
    Multiply,
    Divide,
}

/// Which operand is a constant.
#[derive(Debug, PartialEq)]
pub(super) enum Side {
    Neither,
    Left(Arc<Floats>),
    Right(Arc<Floats>),
}

impl Arithmetic {
    fn of(self, a: f32, b: f32) -> f32 {
        match self {
            Self::Add => a + b,
            Self::Subtract => a - b,
            Self::Multiply => a * b,
            Self::Divide => a / b,
        }
    }

    fn in_place(self, a: &mut [f32], b: impl Iterator<Item = f32>) {
        match self {
            Self::Add => a.iter_mut().zip(b).for_each(|(a, b)| *a += b),
            Self::Subtract => a.iter_mut().zip(b).for_each(|(a, b)| *a -= b),
            Self::Multiply => a.iter_mut().zip(b).for_each(|(a, b)| *a *= b),
            Self::Divide => a.iter_mut().zip(b).for_each(|(a, b)| *a /= b),
        }
    }
}

impl FloatOperation {
    /// Bytes of its constants.
    pub(super) fn bytes(&self) -> usize {
        4 * match self {
            Self::Arithmetic(_, Side::Left(constant) | Side::Right(constant)) => {
                constant.data.len()
            }
            Self::Affine(gain, shift) => gain.len() + shift.len(),
            Self::LayerNorm(gain, shift, _) => gain.len() + shift.as_ref().map_or(0, Vec::len),
            _ => 0,
        }
    }

    pub(super) fn run(&self, mut given: Vec<Value>) -> Result<Floats, DeployError> {
        let x = take(&mut given)?.floats()?;
        Ok(match self {
            Self::Clamp(low, high) => changed(x, |data| clamp(data, *low, *high)),
            Self::Sigmoid => changed(x, sigmoid),
            Self::Tanh => changed(x, tanh),
            Self::Gelu => changed(x, gelu),
            Self::HardSigmoid(alpha, beta) => changed(x, |data| {
                // What is no number stays none: `clamp` keeps it.
                let gate = |x: &mut f32| *x = (*x * alpha + beta).clamp(0.0, 1.0);
                data.iter_mut().for_each(gate);
            }),
            Self::LeakyRelu(slope) => changed(x, |data| {
                let lower = |x: &mut f32| *x *= if *x < 0.0 { *slope } else { 1.0 };
                data.iter_mut().for_each(lower);
            }),
            Self::Arithmetic(kind, side) => match side {
                Side::Left(constant) => arithmetic(*kind, constant.clone(), x)?,
                Side::Right(constant) => arithmetic(*kind, x, constant.clone())?,
                Side::Neither => arithmetic(*kind, x, take(&mut given)?.floats()?)?,
            },
            Self::Affine(gain, shift) => affine(own(x), gain, shift)?,
            Self::Reshape(shape) => {
                let mut x = own(ordered(x));
                x.shape = reshaped(&x.shape, shape, false)?;
                x
            }
            Self::Transpose(axes) => transposed(&ordered(x), axes)?,
            Self::MatMul => matmul(&ordered(x), &ordered(take(&mut given)?.floats()?))?,
            Self::Softmax => softmax(own(ordered(x))),
            Self::LayerNorm(gain, shift, epsilon) => {
                layer_norm(own(ordered(x)), gain, shift.as_deref(), *epsilon)?
            }
            Self::MaxPool(pool) => pool.largest(&channels_last(x))?,
            Self::Mean(axis, keep) => mean(&ordered(x), *axis, *keep)?,
            Self::GlobalMean => global_mean(&ordered(x)),
            Self::Concat(axis) => {
                let mut parts = vec![ordered(x)];
                for part in given {
                    parts.push(ordered(part.floats()?));
                }
                concat(&parts, *axis)?
            }
            Self::Slice(axis, start, end) => slice(&ordered(x), *axis, *start, *end)?,
        })
    }
}

fn changed(x: Arc<Floats>, change: impl Fn(&mut [f32]) + Sync) -> Floats {
    let mut x = own(x);
    in_shares(&mut x.data, 1, |_, data| change(data));
    x
}

fn arithmetic(kind: Arithmetic, a: Arc<Floats>, b: Arc<Floats>) -> Result<Floats, DeployError> {
    if a.shape == b.shape {
        let (a, b) = match a.last == b.last {
            true => (a, b),
            false => (ordered(a), ordered(b)),
        };
        let mut a = own(a);
        in_shares(&mut a.data, 1, |first, a| {
            let b = &b.data[first..][..a.len()];
            match kind {
                Arithmetic::Add => add(a, b),
                _ => kind.in_place(a, b.iter().copied()),
            }
        });
        return Ok(a);
    }
    // Of these it does not matter which is the first: what is repeated comes second.
    let (a, b) = match kind {
        Arithmetic::Add | Arithmetic::Multiply if is_repeated(&a.shape, &b.shape) => (b, a),
        _ => (a, b),
    };
    if let [number] = b.data[..]
        && b.shape.len() <= a.shape.len()
    {
        return Ok(changed(a, |data| {
            let count = data.len();
            kind.in_place(data, std::iter::repeat_n(number, count));
        }));
    }
    if is_gate(&a.shape, &b.shape) {
        let (mut a, b) = (own(a), ordered(b));
        gated(kind, &mut a, &b.data);
        return Ok(a);
    }
    let (a, b) = (ordered(a), ordered(b));
    let ones = b.shape.iter().take_while(|size| **size == 1).count();
    let fits = b.shape.len() <= a.shape.len() && a.shape.ends_with(&b.shape[ones..]);
    if fits && !b.data.is_empty() {
        let mut a = own(a);
        let size = b.data.len();
        in_shares(&mut a.data, size, |_, a| {
            for line in a.chunks_exact_mut(size) {
                kind.in_place(line, b.data.iter().copied());
            }
        });
        return Ok(a);
    }
    broadcast(kind, &a, &b)
}

/// Whether the first has the shape of the second when it is repeated along axes.
fn is_repeated(part: &[usize], of: &[usize]) -> bool {
    let mut pairs = part.iter().rev().zip(of.iter().rev());
    part.len() <= of.len() && pairs.all(|(part, of)| part == of || *part == 1)
}

/// Whether the second has one number for each channel of the first, or of each of its examples.
fn is_gate(of: &[usize], gate: &[usize]) -> bool {
    of.len() > 2
        && gate.len() == of.len()
        && (gate[0] == of[0] || gate[0] == 1)
        && gate[1] == of[1]
        && gate[2..].iter().all(|size| *size == 1)
        && !of.contains(&0)
}

fn gated(kind: Arithmetic, x: &mut Floats, gate: &[f32]) {
    let [_, channels, inner] = extents(&x.shape);
    if gate.len() == channels && (x.last || inner == 1) {
        in_shares(&mut x.data, channels, |_, data| {
            for line in data.chunks_exact_mut(channels) {
                kind.in_place(line, gate.iter().copied());
            }
        });
        return;
    }
    if !x.last {
        in_shares(&mut x.data, inner, |first, data| {
            // Those of one example are those of all.
            let gates = gate.iter().cycle().skip(first % gate.len());
            for (line, gate) in data.chunks_exact_mut(inner).zip(gates) {
                kind.in_place(line, std::iter::repeat_n(*gate, inner));
            }
        });
        return;
    }
    in_shares(&mut x.data, channels * inner, |first, data| {
        let gates = gate[first * channels..].chunks_exact(channels);
        for (example, gates) in data.chunks_exact_mut(channels * inner).zip(gates) {
            for line in example.chunks_exact_mut(channels) {
                kind.in_place(line, gates.iter().copied());
            }
        }
    });
}

fn broadcast(kind: Arithmetic, a: &Floats, b: &Floats) -> Result<Floats, DeployError> {
    let mut data = Vec::with_capacity(a.data.len().max(b.data.len()));
    let shape = each_pair(&a.shape, &b.shape, |i, j| {
        data.push(kind.of(a.data[i], b.data[j]));
    });
    let shape = shape.ok_or_else(|| failed(format!("shapes {:?} and {:?}", a.shape, b.shape)))?;
    Ok(Floats::new(shape, data))
}

/// The shape that two become: axes of one index stand for all, axes that are missing in front are of one.
/// Visits its elements, with where each is in the two; `None` where they do not fit.
fn each_pair(a: &[usize], b: &[usize], mut visit: impl FnMut(usize, usize)) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let size = |shape: &[usize], axis: usize| match (axis + shape.len()).checked_sub(rank) {
        Some(axis) => shape[axis],
        None => 1,
    };
    let mut shape = Vec::with_capacity(rank);
    for axis in 0..rank {
        shape.push(match (size(a, axis), size(b, axis)) {
            (a, b) if a == b => a,
            (1, size) | (size, 1) => size,
            _ => return None,
        });
    }
    // Steps along each axis; none along those that are repeated.
    let steps = |of: &[usize]| {
        let (mut steps, mut step) = (vec![0; rank], 1);
        for axis in (0..rank).rev() {
            if size(of, axis) > 1 {
                steps[axis] = step;
            }
            step *= size(of, axis);
        }
        steps
    };
    let (of_a, of_b) = (steps(a), steps(b));
    let count: usize = shape.iter().product();
    let mut at = vec![0; rank];
    let (mut i, mut j) = (0, 0);
    for _ in 0..count {
        visit(i, j);
        for axis in (0..rank).rev() {
            at[axis] += 1;
            (i, j) = (i + of_a[axis], j + of_b[axis]);
            if at[axis] < shape[axis] {
                break;
            }
            (i, j) = (i - at[axis] * of_a[axis], j - at[axis] * of_b[axis]);
            at[axis] = 0;
        }
    }
    Some(shape)
}

fn affine(mut x: Floats, gain: &[f32], shift: &[f32]) -> Result<Floats, DeployError> {
    let [_, channels, inner] = extents(&x.shape);
    if channels != gain.len() {
        return Err(failed(format!(
            "{} channels, not {:?}",
            gain.len(),
            x.shape
        )));
    }
    if x.last || inner == 1 {
        in_shares(&mut x.data, channels, |_, data| {
            for line in data.chunks_exact_mut(channels.max(1)) {
                for ((x, gain), shift) in line.iter_mut().zip(gain).zip(shift) {
                    *x = *x * gain + shift;
                }
            }
        });
    } else {
        in_shares(&mut x.data, inner, |first, data| {
            for (index, line) in (first..).zip(data.chunks_exact_mut(inner.max(1))) {
                let (gain, shift) = (gain[index % channels], shift[index % channels]);
                line.iter_mut().for_each(|x| *x = *x * gain + shift);
            }
        });
    }
    Ok(x)
}

/// With −1 for what is left, and 0 for the size that was there unless it is meant.
pub(super) fn reshaped(
    from: &[usize],
    to: &[i64],
    is_zero_meant: bool,
) -> Result<Vec<usize>, DeployError> {
    let count: usize = from.iter().product();
    let misfit = || failed(format!("{from:?} is not shaped {to:?}"));
    let mut shape = Vec::with_capacity(to.len());
    let mut left = None;
    for (axis, size) in to.iter().enumerate() {
        shape.push(match size {
            -1 if left.replace(axis).is_none() => 1,
            0 if !is_zero_meant => *from.get(axis).ok_or_else(misfit)?,
            size => usize::try_from(*size).map_err(|_| misfit())?,
        });
    }
    if let Some(axis) = left {
        let known: usize = shape.iter().product();
        shape[axis] = count.checked_div(known).unwrap_or(0);
    }
    match shape.iter().product::<usize>() == count {
        true => Ok(shape),
        false => Err(misfit()),
    }
}

fn transposed(x: &Floats, axes: &[usize]) -> Result<Floats, DeployError> {
    let rank = x.shape.len();
    let mut sorted = axes.to_vec();
    sorted.sort_unstable();
    if !sorted.iter().copied().eq(0..rank) {
        return Err(failed(format!("axes {axes:?} of {:?}", x.shape)));
    }
    let step = |axis: usize| x.shape[axis + 1..].iter().product::<usize>();
    let shape: Vec<usize> = axes.iter().map(|axis| x.shape[*axis]).collect();
    let steps: Vec<usize> = axes.iter().map(|axis| step(*axis)).collect();
    let (inner, by) = match (shape.last(), steps.last()) {
        (Some(inner), Some(by)) if !x.data.is_empty() => (*inner, *by),
        _ => return Ok(Floats { shape, ..x.clone() }),
    };
    let mut data = vec![0.0; x.data.len()];
    in_shares(&mut data, inner, |first, data| {
        let mut at = vec![0; rank - 1];
        let (mut from, mut left) = (0, first);
        for axis in (0..rank - 1).rev() {
            at[axis] = left % shape[axis];
            from += at[axis] * steps[axis];
            left /= shape[axis];
        }
        for line in data.chunks_exact_mut(inner) {
            match by {
                1 => line.copy_from_slice(&x.data[from..from + inner]),
                _ => {
                    let numbers = x.data[from..].iter().step_by(by);
                    line.iter_mut()
                        .zip(numbers)
                        .for_each(|(to, from)| *to = *from);
                }
            }
            for axis in (0..rank - 1).rev() {
                at[axis] += 1;
                from += steps[axis];
                if at[axis] < shape[axis] {
                    break;
                }
                from -= at[axis] * steps[axis];
                at[axis] = 0;
            }
        }
    });
    Ok(Floats::new(shape, data))
}

/// Stacks of matrices, of which one of a side may stand for several of the other.
fn matmul(a: &Floats, b: &Floats) -> Result<Floats, DeployError> {
    let misfit = || failed(format!("no product of {:?} and {:?}", a.shape, b.shape));
    let ([of_a @ .., rows, terms], [of_b @ .., same, columns]) = (&a.shape[..], &b.shape[..])
    else {
        return Err(misfit());
    };
    let (rows, terms, columns) = (*rows, *terms, *columns);
    let mut pairs = Vec::new();
    let front = each_pair(of_a, of_b, |i, j| pairs.push((i, j)));
    let mut shape = front.filter(|_| terms == *same).ok_or_else(misfit)?;
    shape.extend([rows, columns]);
    let mut data = vec![0.0; pairs.len() * rows * columns];
    if terms > 0 && !data.is_empty() {
        let ends = Epilogue::new(columns);
        let done = in_shares(&mut data, rows * columns, |first, data| {
            let mut packed: Option<(usize, FloatMatrix)> = None;
            let outputs = data.chunks_exact_mut(rows * columns);
            for (&(i, j), output) in pairs[first..].iter().zip(outputs) {
                let left = &a.data[i * rows * terms..(i + 1) * rows * terms];
                let right = match packed.take() {
                    Some((known, right)) if known == j => right,
                    _ => {
                        let right = &b.data[j * terms * columns..(j + 1) * terms * columns];
                        FloatMatrix::new(right, terms, columns, Storage::F32)
                            .map_err(|error| failed(error.to_string()))?
                    }
                };
                right.multiply(&Rows::dense(left, terms), &ends, output);
                packed = Some((j, right));
            }
            Ok::<(), DeployError>(())
        });
        done.into_iter().collect::<Result<(), _>>()?;
    }
    Ok(Floats::new(shape, data))
}

fn softmax(mut x: Floats) -> Floats {
    let size = x.shape.last().copied().unwrap_or(1).max(1);
    in_shares(&mut x.data, size, |_, data| {
        burn_lean_kernels::softmax(data, size);
    });
    x
}

fn layer_norm(
    mut x: Floats,
    gain: &[f32],
    shift: Option<&[f32]>,
    epsilon: f32,
) -> Result<Floats, DeployError> {
    if x.shape.last() != Some(&gain.len()) || gain.is_empty() {
        return Err(failed(format!("rows of {}, not {:?}", gain.len(), x.shape)));
    }
    in_shares(&mut x.data, gain.len(), |_, data| {
        burn_lean_kernels::layer_norm(data, gain, shift, epsilon);
    });
    Ok(x)
}

fn mean(x: &Floats, axis: usize, keep: bool) -> Result<Floats, DeployError> {
    let size = *x
        .shape
        .get(axis)
        .ok_or_else(|| failed(format!("no axis {axis} of {:?}", x.shape)))?;
    let inner: usize = x.shape[axis + 1..].iter().product();
    let outer: usize = x.shape[..axis].iter().product();
    let mut data = vec![0.0; outer * inner];
    if inner > 0 && size > 0 {
        let blocks = x.data.chunks_exact(size * inner);
        for (sums, block) in data.chunks_exact_mut(inner).zip(blocks) {
            match sums {
                [sum] => *sum = burn_lean_kernels::sum(block),
                sums => add_lines(sums, block),
            }
        }
    }
    data.iter_mut().for_each(|sum| *sum /= size as f32);
    let mut shape = x.shape.clone();
    match keep {
        true => shape[axis] = 1,
        false => drop(shape.remove(axis)),
    }
    Ok(Floats::new(shape, data))
}

/// Adds lines, many of them in parts: one after the other each addition would round what all before it gave.
fn add_lines(sums: &mut [f32], lines: &[f32]) {
    let size = sums.len();
    let of_part = (lines.len() / size).isqrt().max(512) * size;
    let add_each = |sums: &mut [f32], lines: &[f32]| {
        lines.chunks_exact(size).for_each(|line| add(sums, line));
    };
    if lines.len() <= of_part {
        add_each(sums, lines);
        return;
    }
    let mut part = vec![0.0; size];
    for lines in lines.chunks(of_part) {
        part.fill(0.0);
        add_each(&mut part, lines);
        add(sums, &part);
    }
}

fn global_mean(x: &Floats) -> Floats {
    let [batch, channels, inner] = extents(&x.shape);
    let mut shape = vec![1; x.shape.len()];
    shape[..2].copy_from_slice(&[batch, channels]);
    let mean = |line: &[f32]| burn_lean_kernels::sum(line) / inner as f32;
    Floats::new(shape, x.data.chunks(inner.max(1)).map(mean).collect())
}

fn concat(parts: &[Arc<Floats>], axis: usize) -> Result<Floats, DeployError> {
    let shapes = || parts.iter().map(|part| &part.shape).collect::<Vec<_>>();
    let others = |shape: &[usize]| {
        let mut others = shape.to_vec();
        (axis < others.len())
            .then(|| others.remove(axis))
            .map(|_| others)
    };
    let same = others(&parts[0].shape);
    if same.is_none() || parts.iter().any(|part| others(&part.shape) != same) {
        return Err(failed(format!(
            "{:?} one after the other along axis {axis}",
            shapes()
        )));
    }
    let outer: usize = parts[0].shape[..axis].iter().product();
    let lines: Vec<usize> = parts
        .iter()
        .map(|part| part.shape[axis..].iter().product())
        .collect();
    let mut data = Vec::with_capacity(parts.iter().map(|part| part.data.len()).sum());
    for index in 0..outer {
        for (part, line) in parts.iter().zip(&lines) {
            data.extend_from_slice(&part.data[index * line..(index + 1) * line]);
        }
    }
    let mut shape = parts[0].shape.clone();
    shape[axis] = parts.iter().map(|part| part.shape[axis]).sum();
    Ok(Floats::new(shape, data))
}

/// Bounds below 0 count from the end.
pub(super) fn slice(x: &Floats, axis: usize, start: i64, end: i64) -> Result<Floats, DeployError> {
    let size = x.shape.get(axis).copied().unwrap_or(0) as i64;
    let bound = |at: i64| if at < 0 { at + size } else { at }.clamp(0, size) as usize;
    if axis >= x.shape.len() {
        return Err(failed(format!("no axis {axis} of {:?}", x.shape)));
    }
    // Nothing is left where it ends before it starts.
    let (start, end) = (bound(start), bound(end).max(bound(start)));
    let inner: usize = x.shape[axis + 1..].iter().product();
    let line = x.shape[axis] * inner;
    let mut data = Vec::with_capacity(x.data.len() / x.shape[axis].max(1) * (end - start));
    for line in x.data.chunks_exact(line.max(1)) {
        data.extend_from_slice(&line[start * inner..end * inner]);
    }
    let mut shape = x.shape.clone();
    shape[axis] = end - start;
    Ok(Floats::new(shape, data))
}
