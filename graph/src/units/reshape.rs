//! Places of axes through a change of shape.

use std::collections::HashMap;

use burn::backend::ir::TensorId;

use super::FixedBy;
use super::classes::Classes;

/// The axes that carry units through reshapes which split them, so that a unit is several places: a
/// head of an attention, a group of channels. The sizes are written into the model and become smaller
/// with it.
#[derive(Debug, Default)]
pub(super) struct Splits(HashMap<(TensorId, usize), Split>);

#[derive(Debug, Default)]
struct Split {
    /// Which of the axes that could carry them.
    choice: usize,
    /// How many there are.
    choices: usize,
    /// A place of the axis.
    unit: Option<u32>,
}

impl Splits {
    /// Lets the next axis carry the units of those splits where the last one was of no use, if there
    /// is one that has any left: `is_useful` says it of a place.
    pub(super) fn advance(&mut self, mut is_useful: impl FnMut(u32) -> bool) -> bool {
        let mut any = false;
        for split in self.0.values_mut() {
            let choices = std::mem::take(&mut split.choices);
            let useless = !split.unit.take().is_some_and(&mut is_useful);
            if useless && split.choice < choices {
                split.choice += 1;
                any = true;
            }
        }
        any
    }
}

/// The axes of a tensor after a reshape.
///
/// Axes are taken together where their sizes multiply to the same number. In a merge one of them
/// carries units, the others are fixed; a split gives them to the axis along which they differ, or,
/// with `splits`, to one along which several become one.
pub(super) fn reshaped(
    axes: &[Vec<u32>],
    (out, shape): (TensorId, &[usize]),
    classes: &mut Classes,
    mut splits: Option<&mut Splits>,
) -> Vec<Vec<u32>> {
    let mut made: Vec<Vec<u32>> = Vec::with_capacity(shape.len());
    let (mut from, mut to) = (0, 0);
    while from < axes.len() || to < shape.len() {
        let (first, next) = (from, to);
        let (mut a, mut b) = (1, 1);
        // The smallest blocks of one size, of at least one axis each where there is one.
        loop {
            if a <= b && from < axes.len() && (a < b || from == first) {
                a *= axes[from].len();
                from += 1;
            } else if to < shape.len() && (b < a || to == next) {
                b *= shape[to];
                to += 1;
            } else {
                break;
            }
        }
        if a != b {
            // Sizes of zero, or what is no reshape.
            for axes in axes {
                classes.fix(axes, &FixedBy::Reshape);
            }
            return pinned(shape, classes);
        }
        let split = splits
            .as_mut()
            .map(|splits| splits.0.entry((out, next)).or_default());
        made.extend(block(&axes[first..from], &shape[next..to], classes, split));
    }
    made
}

fn pinned(shape: &[usize], classes: &mut Classes) -> Vec<Vec<u32>> {
    shape
        .iter()
        .map(|n| classes.pinned(*n, FixedBy::Reshape))
        .collect()
}

/// Axes whose sizes multiply to the same number as those of `shape`.
fn block(
    axes: &[Vec<u32>],
    shape: &[usize],
    classes: &mut Classes,
    split: Option<&mut Split>,
) -> Vec<Vec<u32>> {
    if axes.is_empty() {
        // New axes of one place split nothing and mix nothing.
        return shape.iter().map(|n| classes.fresh(*n)).collect();
    }
    let sizes: Vec<usize> = axes.iter().map(Vec::len).collect();
    let mut out = pinned(shape, classes);
    let long = (0..sizes.len()).filter(|axis| sizes[*axis] > 1 || sizes.len() == 1);
    let free: Vec<usize> = long
        .filter(|axis| !classes.is_fixed(&axes[*axis]))
        .collect();
    let [axis] = &free[..] else {
        if let ([], Some(last)) = (&free[..], axes.last()) {
            // For what they could not go for before.
            let why = last.first().and_then(|id| classes.fixed(*id));
            let same = |n: &usize| classes.pinned(*n, why.clone().unwrap_or(FixedBy::Reshape));
            return shape.iter().map(same).collect();
        }
        // Of several nobody knows which carries units.
        for axis in free {
            classes.fix(&axes[axis], &FixedBy::Reshape);
        }
        return out;
    };
    let ids = &axes[*axis];
    // The place on that axis, and on one of the new ones, of each number of the block.
    let inner: usize = sizes[axis + 1..].iter().product();
    let size: usize = sizes.iter().product();
    let old = |number: usize| number / inner % ids.len();
    let on = |axis: usize| {
        let inner: usize = shape[axis + 1..].iter().product();
        move |number: usize| number / inner % shape[axis]
    };
    // A merge, or a split: all places with one index on some new axis are one unit.
    for axis in (0..shape.len()).filter(|axis| shape[*axis] > 1 || shape.len() == 1) {
        let new = on(axis);
        let mut units: Vec<Option<u32>> = vec![None; shape[axis]];
        let fits = (0..size).all(|number| {
            let id = classes.root(ids[old(number)]);
            *units[new(number)].get_or_insert(id) == id
        });
        if fits && let Some(units) = units.into_iter().collect() {
            out[axis] = units;
            return out;
        }
    }
    let Some(split) = split else {
        classes.fix(ids, &FixedBy::Reshape);
        return out;
    };
    // Places that meet on a new axis become one, if more than one unit is left.
    let candidates = (0..shape.len()).filter_map(|axis| {
        let new = on(axis);
        // By new place, the first old one; a place that is cut in two by it is no unit.
        let mut units: Vec<Option<u32>> = vec![None; shape[axis]];
        let mut of_old: Vec<Option<usize>> = vec![None; ids.len()];
        let whole = (0..size).all(|number| {
            let (here, there) = (old(number), new(number));
            units[there].get_or_insert(ids[here]);
            *of_old[here].get_or_insert(there) == there
        });
        let units: Vec<u32> = units.into_iter().collect::<Option<_>>()?;
        let joined: Vec<usize> = of_old.into_iter().collect::<Option<_>>()?;
        (whole && shape[axis] > 1).then_some((axis, units, joined))
    });
    let candidates: Vec<_> = candidates.collect();
    split.choices = candidates.len();
    match candidates.into_iter().nth(split.choice) {
        Some((axis, units, joined)) => {
            for (id, unit) in ids.iter().zip(joined) {
                classes.join(*id, units[unit]);
            }
            split.unit = units.first().copied();
            out[axis] = units;
        }
        None => classes.fix(ids, &FixedBy::Reshape),
    }
    out
}
