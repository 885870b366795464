//! Places of axes through a change of shape.

use super::FixedBy;
use super::classes::Classes;

/// The axes of a tensor after a reshape.
///
/// Axes are taken together where their sizes multiply to the same number. In a merge one of them
/// carries units, the others are fixed; a split gives them to the axis along which they differ.
pub(super) fn reshaped(axes: &[Vec<u32>], shape: &[usize], classes: &mut Classes) -> Vec<Vec<u32>> {
    let mut out: Vec<Vec<u32>> = Vec::with_capacity(shape.len());
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
        out.extend(block(&axes[first..from], &shape[next..to], classes));
    }
    out
}

fn pinned(shape: &[usize], classes: &mut Classes) -> Vec<Vec<u32>> {
    shape
        .iter()
        .map(|n| classes.pinned(*n, FixedBy::Reshape))
        .collect()
}

/// Axes whose sizes multiply to the same number as those of `shape`.
fn block(axes: &[Vec<u32>], shape: &[usize], classes: &mut Classes) -> Vec<Vec<u32>> {
    let long = |count: usize| move |(_, n): &(usize, usize)| *n > 1 || count == 1;
    let sizes: Vec<usize> = axes.iter().map(Vec::len).collect();
    let from: Vec<usize> = places(&sizes, long(sizes.len()));
    let to: Vec<usize> = places(shape, long(shape.len()));
    let mut out: Vec<Vec<u32>> = shape
        .iter()
        .map(|n| classes.pinned(*n, FixedBy::Reshape))
        .collect();
    let free: Vec<usize> = (from.iter().copied())
        .filter(|axis| !classes.is_fixed(&axes[*axis]))
        .collect();
    match (&free[..], &from[..], &to[..]) {
        // Nothing that could go.
        ([], ..) => {}
        ([axis], [_], [only]) => out[*only] = axes[*axis].clone(),
        // A merge: each place of the new axis belongs to one of the old one.
        ([axis], _, [only]) => {
            let inner: usize = sizes[axis + 1..].iter().product();
            let ids = (0..shape[*only]).map(|place| axes[*axis][place / inner % sizes[*axis]]);
            out[*only] = ids.collect();
        }
        // A split: all places with one index on some new axis are one unit.
        ([axis], [_], _) => match carrier(&axes[*axis], shape, &to) {
            Some((new, ids)) => out[new] = ids,
            None => classes.fix(&axes[*axis], &FixedBy::Reshape),
        },
        _ => {
            for axis in free {
                classes.fix(&axes[axis], &FixedBy::Reshape);
            }
        }
    }
    out
}

fn places(sizes: &[usize], counts: impl Fn(&(usize, usize)) -> bool) -> Vec<usize> {
    let all = sizes.iter().copied().enumerate();
    all.filter(counts).map(|(axis, _)| axis).collect()
}

/// The new axis along which the units of an old one differ, and its units.
fn carrier(ids: &[u32], shape: &[usize], to: &[usize]) -> Option<(usize, Vec<u32>)> {
    to.iter().find_map(|axis| {
        let inner: usize = shape[axis + 1..].iter().product();
        let index = |place: usize| place / inner % shape[*axis];
        let mut units = vec![None; shape[*axis]];
        let fits = ids.iter().enumerate().all(|(place, id)| {
            let unit = units[index(place)].get_or_insert(*id);
            unit == id
        });
        let units: Option<Vec<u32>> = units.into_iter().collect();
        units.filter(|_| fits).map(|units| (*axis, units))
    })
}
