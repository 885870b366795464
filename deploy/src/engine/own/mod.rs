//! Runs an exported model with the products of `burn-lean-kernels`.
//!
//! Products and operations on floats are computed here; runs of others are models of their own, which rten
//! computes.

mod attributes;
mod convolution;
mod float_operation;
mod linear;
mod plan;
mod pool;
mod ranging;
mod repeat;
mod sparse;
mod value;

use std::sync::Arc;

use burn_lean_kernels::Storage;
use rten::Value as Foreign;

use super::pools::Pools;
use super::program::Program;
use super::report::SparseLayer;
use crate::{DeployError, OnnxModel};
use convolution::Convolution;
use float_operation::FloatOperation;
use linear::Linear;
use ranging::Ranging;
use repeat::Repeat;
use value::{Codes, Floats, Value};

/// How weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Keep {
    /// Those that stay floats.
    pub(crate) floats: Storage,
    /// Matrices of which half is zero as their nonzero numbers, where [`Runner::settle`] finds them faster.
    pub(crate) sparse: bool,
    /// Wide matrices of codes of 8 bits for left sides of many rows, where the CPU has products for them.
    pub(crate) many_rows: bool,
}

/// A model that is ready to run.
#[derive(Debug)]
pub(crate) struct Runner {
    steps: Vec<Step>,
    slots: usize,
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    resident_bytes: usize,
    /// Whether a matrix is packed for many rows.
    has_many_rows: bool,
    /// Weights of which half is zero and that no product leaves out.
    dense_zeros: Vec<SparseLayer>,
    pool: Option<Arc<rayon::ThreadPool>>,
}

#[derive(Debug)]
struct Step {
    operation: Operation,
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    /// Slots that nothing reads afterwards.
    freed: Vec<usize>,
}

#[derive(Debug)]
enum Operation {
    /// The codes of floats. `last`: with the channels last.
    Quantize {
        ranging: Ranging,
        last: bool,
    },
    /// The values that codes of floats stand for.
    Round(Ranging),
    Linear(Linear),
    Convolution(Convolution),
    Float(Arc<FloatOperation>),
    Foreign(Box<Program>),
    Repeat(Box<Repeat>),
    /// A part of floats along an axis, from one number that is computed to another.
    Part(usize),
    /// Floats from the last to the first along the first axis.
    Reversed,
    /// Floats in a shape that is computed; whether a size of 0 is meant.
    Reshaped(bool),
    /// A whole number, as a list of one, times one and plus another one.
    Whole(i32, i32),
}

impl Runner {
    /// Packs a model.
    pub(crate) fn new(model: &OnnxModel, keep: Keep, pools: &Pools) -> Result<Self, DeployError> {
        let mut runner = plan::plan(model, keep, pools)?;
        runner.pool = pools.own()?;
        Ok(runner)
    }

    pub(crate) fn resident_bytes(&self) -> usize {
        self.resident_bytes
    }

    pub(crate) fn has_many_rows(&self) -> bool {
        self.has_many_rows
    }

    pub(crate) fn run(&self, inputs: Vec<Foreign>) -> Result<Vec<Foreign>, DeployError> {
        match &self.pool {
            Some(pool) => pool.install(|| self.steps(inputs)),
            None => self.steps(inputs),
        }
    }

    fn steps(&self, inputs: Vec<Foreign>) -> Result<Vec<Foreign>, DeployError> {
        let inputs = inputs.into_iter().map(Value::of).collect();
        let results = self.compute(inputs)?.into_iter();
        results.map(Value::into_foreign).collect()
    }

    fn compute(&self, inputs: Vec<Value>) -> Result<Vec<Value>, DeployError> {
        let mut slots = self.filled(inputs);
        for step in &self.steps {
            let given = step.given(&mut slots)?;
            step.keep(step.operation.run(given)?, &mut slots);
        }
        let results = self.outputs.iter().map(|slot| {
            let value = slots[*slot].clone();
            value.ok_or_else(|| failed("a result is missing"))
        });
        results.collect()
    }
}

impl Runner {
    /// The slots, with the inputs in theirs.
    fn filled(&self, inputs: Vec<Value>) -> Vec<Option<Value>> {
        let mut slots: Vec<Option<Value>> = Vec::new();
        slots.resize_with(self.slots, || None);
        for (slot, value) in self.inputs.iter().zip(inputs) {
            slots[*slot] = Some(value);
        }
        slots
    }
}

impl Step {
    /// Its operands.
    fn given(&self, slots: &mut [Option<Value>]) -> Result<Vec<Value>, DeployError> {
        let mut given: Vec<Value> = Vec::with_capacity(self.inputs.len());
        for (position, slot) in self.inputs.iter().enumerate() {
            let again = self.inputs[position + 1..].contains(slot);
            let value = match self.freed.contains(slot) && !again {
                true => slots[*slot].take(),
                false => slots[*slot].clone(),
            };
            given.push(value.ok_or_else(|| failed("an operand is missing"))?);
        }
        Ok(given)
    }

    /// Puts its results where others read them.
    fn keep(&self, made: Vec<Value>, slots: &mut [Option<Value>]) {
        for (slot, value) in self.outputs.iter().zip(made) {
            slots[*slot] = Some(value);
        }
        for slot in &self.freed {
            slots[*slot] = None;
        }
    }
}

fn failed(reason: impl Into<String>) -> DeployError {
    DeployError::Run {
        reason: reason.into(),
    }
}

impl Operation {
    fn run(&self, mut given: Vec<Value>) -> Result<Vec<Value>, DeployError> {
        let value = match self {
            Self::Foreign(program) => {
                let mut held: Vec<Option<Value>> = given.into_iter().map(Some).collect();
                let lent = held.iter_mut().map(Value::lend);
                let made = program.run(lent.collect::<Result<Vec<_>, _>>()?)?;
                return Ok(made.into_iter().map(Value::of).collect());
            }
            Self::Repeat(repeat) => return repeat.run(given),
            Self::Part(axis) => repeat::part(given, *axis)?,
            Self::Reversed => repeat::reversed(take(&mut given)?)?,
            Self::Reshaped(zero) => repeat::reshaped(given, *zero)?,
            Self::Whole(times, plus) => repeat::line(take(&mut given)?, *times, *plus)?,
            Self::Quantize { ranging, last } => {
                let x = take(&mut given)?.floats()?;
                let x = match last {
                    true => value::channels_last(x),
                    false => value::ordered(x),
                };
                Value::Codes(Arc::new(Codes::of(&x, *ranging)))
            }
            Self::Round(ranging) => {
                let x = value::ordered(take(&mut given)?.floats()?);
                Value::floats_of(Codes::of(&x, *ranging).values())
            }
            Self::Linear(linear) => Value::floats_of(linear.run(take(&mut given)?)?),
            Self::Convolution(convolution) => Value::floats_of(convolution.run(take(&mut given)?)?),
            Self::Float(operation) => Value::floats_of(operation.run(given)?),
        };
        Ok(vec![value])
    }
}

fn take(given: &mut Vec<Value>) -> Result<Value, DeployError> {
    match given.is_empty() {
        true => Err(failed("an operand is missing")),
        false => Ok(given.remove(0)),
    }
}

/// The only value, changed in place where nothing else holds it.
fn own(x: Arc<Floats>) -> Floats {
    Arc::try_unwrap(x).unwrap_or_else(|shared| (*shared).clone())
}
