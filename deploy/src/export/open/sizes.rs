//! Sizes that stay open, in terms of what is known when a file runs.

use std::collections::HashMap;

use burn::backend::ir::TensorId;

/// Factors of a size, at most.
const FACTORS: usize = 4;

/// A size along an axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Size {
    /// Always this one.
    Fixed(usize),
    /// So many times the product of known sizes, which are named by their positions.
    Open(usize, Vec<usize>),
}

impl Size {
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::Open(..))
    }
}

/// A whole number that an operation has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Number {
    /// Always this one.
    Fixed(i64),
    /// A size that stays open, or as much below 0.
    Open { is_negative: bool, size: Size },
}

/// How a file finds a size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Known {
    /// That of a tensor along an axis.
    Axis(TensorId, usize),
    /// Known sizes before it, each so many times, and a number.
    Sum(Vec<(i64, usize)>, i64),
}

#[derive(Debug)]
struct Entry {
    /// In each of the recordings.
    values: Vec<usize>,
    known: Known,
    text: String,
}

/// The known sizes. Two sizes are the same where all recordings have the same numbers for them.
#[derive(Debug, Default)]
pub(crate) struct Sizes {
    entries: Vec<Entry>,
    explained: HashMap<Vec<usize>, Size>,
}

impl Sizes {
    /// The size of a tensor along an axis, under a name.
    pub(super) fn name(&mut self, text: String, values: Vec<usize>, of: TensorId, axis: usize) {
        self.push(values, Known::Axis(of, axis), text);
    }

    /// A size that nothing before explains, of a tensor that has it when it is computed.
    pub(super) fn computed(&mut self, values: Vec<usize>, of: TensorId, axis: usize) -> Size {
        let text = format!("open_{}", self.entries.len());
        let at = self.push(values.clone(), Known::Axis(of, axis), text);
        let size = Size::Open(1, vec![at]);
        self.explained.insert(values, size.clone());
        size
    }

    /// What is the size that has these numbers in the recordings: a multiple of a product of known sizes,
    /// or a sum of some with a number.
    pub(super) fn explain(&mut self, values: &[usize]) -> Option<Size> {
        if let Some(size) = self.explained.get(values) {
            return Some(size.clone());
        }
        let size = match self.product(values, 0, FACTORS) {
            Some((times, factors)) if factors.is_empty() => Size::Fixed(times),
            Some((times, factors)) => Size::Open(times, factors),
            None => {
                let (parts, plus) = self.sum(values)?;
                let text = self.sum_text(&parts, plus);
                let at = self.push(values.to_vec(), Known::Sum(parts, plus), text);
                Size::Open(1, vec![at])
            }
        };
        self.explained.insert(values.to_vec(), size.clone());
        Some(size)
    }

    /// What is the number that is this one in the recordings.
    pub(super) fn number(&mut self, values: &[i64]) -> Option<Number> {
        let first = *values.first()?;
        if values.iter().all(|value| *value == first) {
            return Some(Number::Fixed(first));
        }
        let is_negative = values.iter().any(|value| *value < 0);
        let size = |value: &i64| match is_negative {
            true => usize::try_from(value.checked_neg()?).ok(),
            false => usize::try_from(*value).ok(),
        };
        let sizes = values.iter().map(size).collect::<Option<Vec<usize>>>()?;
        let size = self.explain(&sizes)?;
        Some(Number::Open { is_negative, size })
    }

    fn push(&mut self, values: Vec<usize>, known: Known, text: String) -> usize {
        self.entries.push(Entry {
            values,
            known,
            text,
        });
        self.entries.len() - 1
    }

    fn product(&self, values: &[usize], from: usize, left: usize) -> Option<(usize, Vec<usize>)> {
        let first = *values.first()?;
        if values.iter().all(|value| *value == first) {
            return Some((first, Vec::new()));
        }
        if left == 0 {
            return None;
        }
        (from..self.entries.len()).find_map(|at| {
            let pairs = values.iter().zip(&self.entries[at].values);
            let divided = pairs.map(|(value, by)| match *by > 0 && value.is_multiple_of(*by) {
                true => Some(value / by),
                false => None,
            });
            let divided: Vec<usize> = divided.collect::<Option<_>>()?;
            let (times, mut factors) = self.product(&divided, at, left - 1)?;
            factors.insert(0, at);
            Some((times, factors))
        })
    }

    fn sum(&self, values: &[usize]) -> Option<(Vec<(i64, usize)>, i64)> {
        let values: Vec<i64> = values.iter().map(|value| *value as i64).collect();
        if let Some((at, times, plus)) = self.line(&values) {
            return Some((vec![(times, at)], plus));
        }
        let mut all = (0..self.entries.len()).flat_map(|at| [(1, at), (-1, at)]);
        all.find_map(|(sign, first): (i64, usize)| {
            let pairs = values.iter().zip(&self.entries[first].values);
            let rest: Vec<i64> = pairs.map(|(x, y)| x - sign * (*y as i64)).collect();
            let (second, times, plus) = self.line(&rest)?;
            (second != first).then(|| (vec![(sign, first), (times, second)], plus))
        })
    }

    /// The known size that these numbers are a line of.
    fn line(&self, values: &[i64]) -> Option<(usize, i64, i64)> {
        (0..self.entries.len()).find_map(|at| {
            let (times, plus) = line(values, &self.entries[at].values)?;
            Some((at, times, plus))
        })
    }

    fn sum_text(&self, parts: &[(i64, usize)], plus: i64) -> String {
        let mut text = String::new();
        for (times, at) in parts {
            let lead = sign(*times, text.is_empty());
            let factor = self.factor(*at);
            match times.abs() {
                1 => text += &format!("{lead}{factor}"),
                times => text += &format!("{lead}{times}*{factor}"),
            }
        }
        if plus != 0 {
            text += &format!("{}{}", sign(plus, false), plus.abs());
        }
        text
    }

    /// A known size as a factor of a product.
    fn factor(&self, at: usize) -> String {
        let text = &self.entries[at].text;
        match text.contains(' ') {
            true => format!("({text})"),
            false => text.clone(),
        }
    }

    pub(crate) fn known(&self, at: usize) -> &Known {
        &self.entries[at].known
    }

    /// As a file calls it.
    pub(crate) fn text(&self, size: &Size) -> String {
        match size {
            Size::Fixed(size) => size.to_string(),
            Size::Open(1, factors) if factors.len() == 1 => self.entries[factors[0]].text.clone(),
            Size::Open(times, factors) => {
                let times = (*times != 1).then(|| times.to_string());
                let factors = factors.iter().map(|at| self.factor(*at));
                let all: Vec<String> = times.into_iter().chain(factors).collect();
                all.join("*")
            }
        }
    }

    /// Whether a size is found at this tensor.
    pub(crate) fn is_of(&self, size: &Size, tensor: TensorId) -> bool {
        match size {
            Size::Fixed(_) => false,
            Size::Open(_, factors) => factors.iter().any(|at| self.is_known_of(*at, tensor)),
        }
    }

    fn is_known_of(&self, at: usize, tensor: TensorId) -> bool {
        match self.known(at) {
            Known::Axis(of, _) => *of == tensor,
            Known::Sum(parts, _) => parts.iter().any(|(_, at)| self.is_known_of(*at, tensor)),
        }
    }
}

/// What comes before a number in a sum.
fn sign(number: i64, is_first: bool) -> &'static str {
    match (number < 0, is_first) {
        (false, true) => "",
        (true, true) => "-",
        (false, false) => " + ",
        (true, false) => " - ",
    }
}

/// Factor and addend of the line through all of these points, whole numbers; `None` for another curve, and
/// for one that is level.
fn line(values: &[i64], by: &[usize]) -> Option<(i64, i64)> {
    let (y, x) = (*values.first()?, *by.first()? as i64);
    let points = || values.iter().zip(by).map(|(y, x)| (*y, *x as i64));
    let (other_y, other_x) = points().find(|(_, other)| *other != x)?;
    let (rise, run) = (other_y - y, other_x - x);
    if rise == 0 || rise % run != 0 {
        return None;
    }
    let times = rise / run;
    let plus = y - times * x;
    points()
        .all(|(y, x)| y == times * x + plus)
        .then_some((times, plus))
}

#[cfg(test)]
mod tests {
    use super::{Number, Size, Sizes};
    use burn::backend::ir::TensorId;

    /// Batch and sequence, in five recordings.
    fn sizes() -> Sizes {
        let mut sizes = Sizes::default();
        let of = TensorId::new(0);
        sizes.name("batch".into(), vec![2, 3, 2, 2, 5], of, 0);
        sizes.name("sequence".into(), vec![4, 4, 5, 11, 9], of, 1);
        sizes
    }

    #[test]
    fn products_and_sums_are_told_from_the_recordings() {
        let mut sizes = sizes();
        let mut text = |values: [usize; 5]| {
            let size = sizes.explain(&values);
            size.map(|size| sizes.text(&size))
        };
        assert_eq!(text([7; 5]).unwrap(), "7");
        assert_eq!(text([2, 3, 2, 2, 5]).unwrap(), "batch");
        assert_eq!(text([24, 36, 30, 66, 135]).unwrap(), "3*batch*sequence");
        assert_eq!(text([16, 16, 25, 121, 81]).unwrap(), "sequence*sequence");
        assert_eq!(text([5, 5, 6, 12, 10]).unwrap(), "sequence + 1");
        assert_eq!(text([5, 5, 7, 19, 15]).unwrap(), "2*sequence - 3");
        assert_eq!(text([6, 7, 7, 13, 14]).unwrap(), "batch + sequence");
        // A product with a sum that was found before.
        assert_eq!(text([10, 15, 12, 24, 50]).unwrap(), "batch*(sequence + 1)");
        // Halves.
        assert_eq!(text([2, 2, 2, 5, 4]), None);
    }

    #[test]
    fn numbers_are_sizes_or_as_much_below_0() {
        let mut sizes = sizes();
        let mut text = |values: [i64; 5]| match sizes.number(&values)? {
            Number::Fixed(number) => Some(number.to_string()),
            Number::Open { is_negative, size } => Some(format!(
                "{}{}",
                ["", "-"][usize::from(is_negative)],
                sizes.text(&size)
            )),
        };
        assert_eq!(text([-3; 5]).unwrap(), "-3");
        assert_eq!(text([4, 4, 5, 11, 9]).unwrap(), "sequence");
        assert_eq!(text([-3, -3, -4, -10, -8]).unwrap(), "-sequence - 1");
        // On both sides of 0, and i64::MIN, which has no number above 0.
        assert_eq!(text([-1, 0, -1, -1, 2]), None);
        assert_eq!(text([i64::MIN, 0, 0, 0, 0]), None);
    }

    #[test]
    fn a_size_that_is_computed_explains_others() {
        let mut sizes = sizes();
        let halves = sizes.computed(vec![2, 2, 2, 5, 4], TensorId::new(7), 3);
        assert_eq!(halves, Size::Open(1, vec![2]));
        assert!(sizes.is_of(&halves, TensorId::new(7)));
        let twice = sizes.explain(&[4, 6, 4, 10, 20]).unwrap();
        assert_eq!(sizes.text(&twice), "batch*open_2");
        let more = sizes.explain(&[3, 3, 3, 6, 5]).unwrap();
        assert_eq!(sizes.text(&more), "open_2 + 1");
        assert!(sizes.is_of(&more, TensorId::new(7)));
    }
}
