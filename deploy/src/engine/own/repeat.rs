//! Loops: a step that is a model of its own, run as often as there are steps.

use std::collections::HashMap;

use rten_tensor::prelude::*;

use super::float_operation::{self, slice};
use super::value::{Floats, Value, ordered};
use super::{Runner, failed, own};
use crate::{DeployError, Dimension, ElementType};

/// A loop.
#[derive(Debug)]
pub(super) struct Repeat {
    /// From the number of the step and whether there is one, the states, and what it reads from outside, to
    /// the next states and what is collected.
    pub(super) step: Runner,
    /// The shapes of the states, and of what is collected of each step.
    pub(super) states: Vec<Vec<Dimension>>,
    pub(super) parts: Vec<(ElementType, Vec<Dimension>)>,
}

impl Repeat {
    /// From the number of steps, the states, and what the steps read from outside, to the states after the last
    /// step and what was collected of all, along an axis before the others.
    pub(super) fn run(&self, given: Vec<Value>) -> Result<Vec<Value>, DeployError> {
        let mut given = given.into_iter();
        let count = given.next().ok_or_else(|| failed("a loop has no count"))?;
        let count = whole(count)?;
        let mut states: Vec<Value> = given.by_ref().take(self.states.len()).collect();
        let captured: Vec<Value> = given.collect();
        let mut collected: Vec<Collected> = Vec::new();
        if count == 0 {
            collected = self.nothing(&states)?;
        }
        for number in 0..count {
            let own = [number, 1].map(|number| Value::of(number.into()));
            let inputs = own
                .into_iter()
                .chain(states)
                .chain(captured.iter().cloned());
            let mut made = self.step.compute(inputs.collect())?.into_iter();
            states = made.by_ref().take(self.states.len()).collect();
            for (place, part) in made.enumerate() {
                match collected.get_mut(place) {
                    Some(collected) => collected.push(part)?,
                    None => collected.push(Collected::of(part, count as usize)?),
                }
            }
        }
        let collected = collected.into_iter().map(|one| one.whole(count as usize));
        Ok(states.into_iter().chain(collected).collect())
    }

    /// What is collected of no step: a size that is not known is that of a state.
    fn nothing(&self, states: &[Value]) -> Result<Vec<Collected>, DeployError> {
        let mut sizes: HashMap<&str, usize> = HashMap::new();
        for (names, state) in self.states.iter().zip(states) {
            for (name, size) in names.iter().zip(state.shape()) {
                if let Dimension::Open(name) = name {
                    sizes.insert(name, size);
                }
            }
        }
        let shape = |names: &Vec<Dimension>| {
            let size = |name: &Dimension| match name {
                Dimension::Fixed(size) => Some(*size),
                Dimension::Open(name) => sizes.get(name.as_str()).copied(),
            };
            let shape = names.iter().map(size).collect::<Option<Vec<usize>>>();
            shape.ok_or_else(|| failed("a loop of no steps has a result whose size nothing tells"))
        };
        let parts = self.parts.iter().map(|(element, names)| {
            Ok(match element {
                ElementType::F32 => Collected::Floats(shape(names)?, Vec::new()),
                _ => Collected::Integers(shape(names)?, Vec::new()),
            })
        });
        parts.collect()
    }
}

/// A whole number.
fn whole(value: Value) -> Result<i32, DeployError> {
    let number = value.integers().and_then(|number| number.item().copied());
    number.ok_or_else(|| failed("the count of a loop is no whole number"))
}

/// Of floats what is along an axis from one number to another; what is beyond is cut off.
pub(super) fn part(given: Vec<Value>, axis: usize) -> Result<Value, DeployError> {
    let mut given = given.into_iter();
    let mut next = || given.next().ok_or_else(|| failed("an operand is missing"));
    let x = ordered(next()?.floats()?);
    let (start, end) = (whole(next()?)?, whole(next()?)?);
    let part = slice(&x, axis, start.into(), end.into())?;
    Ok(Value::floats_of(part))
}

/// Floats from the last to the first along the first axis, of which there may be none.
pub(super) fn reversed(x: Value) -> Result<Value, DeployError> {
    let x = ordered(x.floats()?);
    let inner: usize = x.shape.iter().skip(1).product();
    let parts = x.data.chunks(inner.max(1)).rev();
    let data = parts.flatten().copied().collect();
    Ok(Value::floats_of(Floats::new(x.shape.clone(), data)))
}

/// Floats in a shape that is computed: -1 is what is left, and 0 the size that the axis had unless it is meant.
pub(super) fn reshaped(given: Vec<Value>, is_zero_meant: bool) -> Result<Value, DeployError> {
    let mut given = given.into_iter();
    let mut next = || given.next().ok_or_else(|| failed("an operand is missing"));
    let mut x = own(ordered(next()?.floats()?));
    let sizes = next()?;
    let sizes = sizes.integers();
    let sizes = sizes.ok_or_else(|| failed("a shape is not of whole numbers"))?;
    let sizes: Vec<i64> = sizes.iter().map(|size| i64::from(*size)).collect();
    x.shape = float_operation::reshaped(&x.shape, &sizes, is_zero_meant)?;
    Ok(Value::floats_of(x))
}

/// A whole number times one plus another one, as a list of one.
pub(super) fn line(x: Value, times: i32, plus: i32) -> Result<Value, DeployError> {
    let number = whole(x)?.checked_mul(times);
    let number = number.and_then(|number| number.checked_add(plus));
    let number = number.ok_or_else(|| failed("a number is beyond 32 bits"))?;
    let list = rten_tensor::Tensor::from_data(&[1][..], vec![number]);
    Ok(Value::of(list.into()))
}

/// The parts of the steps so far.
enum Collected {
    Floats(Vec<usize>, Vec<f32>),
    Integers(Vec<usize>, Vec<i32>),
}

impl Collected {
    fn of(first: Value, count: usize) -> Result<Self, DeployError> {
        let mut found = match (&first, first.integers()) {
            (_, Some(x)) => Self::Integers(x.shape().to_vec(), Vec::with_capacity(count * x.len())),
            (Value::Floats(x), None) => {
                Self::Floats(x.shape.clone(), Vec::with_capacity(count * x.data.len()))
            }
            _ => {
                return Err(failed(
                    "what a loop collects is neither floats nor integers",
                ));
            }
        };
        found.push(first)?;
        Ok(found)
    }

    fn push(&mut self, part: Value) -> Result<(), DeployError> {
        let integers = part.integers();
        match (self, &part, integers) {
            (Self::Integers(shape, data), _, Some(part)) if shape[..] == *part.shape() => {
                data.extend(part.iter());
            }
            (Self::Floats(shape, data), Value::Floats(part), _) if *shape == part.shape => {
                data.extend(&ordered(part.clone()).data);
            }
            _ => return Err(failed("a loop collects parts of other shapes")),
        }
        Ok(())
    }

    /// Along an axis before the others.
    fn whole(self, count: usize) -> Value {
        let along = |shape: Vec<usize>| [vec![count], shape].concat();
        match self {
            Self::Floats(shape, data) => Value::floats_of(Floats::new(along(shape), data)),
            Self::Integers(shape, data) => {
                Value::of(rten_tensor::Tensor::from_data(&along(shape)[..], data).into())
            }
        }
    }
}
