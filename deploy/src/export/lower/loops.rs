//! Loops over an axis of any size, as ONNX's `Loop`.

use burn::backend::ir::TensorIr;
use burn_lean_graph::{LoopPart, Node};

use super::{Unwritten, Written};
use crate::ValueInfo;
use crate::export::Writer;
use crate::export::open::Size;
use crate::onnx::Attribute;

impl<'a> Writer<'a> {
    /// Writes what frames a step. What is between `Begin` and `End` goes into the loop's body.
    pub(super) fn looped(&mut self, part: LoopPart<'a>, node: Node<'a>) -> Written {
        match part {
            LoopPart::Begin {
                count,
                initial,
                states,
            } => {
                let count = self.shape(count);
                let initial = initial.iter().map(|tensor| self.operand(tensor));
                let initial = initial.collect::<Result<Vec<_>, _>>()?;
                let mut given = Vec::with_capacity(states.len());
                for state in states {
                    let name = self.unique("state");
                    given.push(self.info(state, name.clone())?);
                    self.set(state, name);
                }
                self.begin_step(count, initial, given);
                Ok(())
            }
            LoopPart::Take {
                from,
                part,
                axis,
                step,
                ..
            } => {
                let x = self.activation_operand(node, 0, from)?;
                let start = self.open.numbers(node.index()).first().cloned();
                let start = start.ok_or("where its parts start is not known")?;
                let length = self.sizes(part)[axis].clone();
                let ends = self.bounds(&start, step as i64, &length)?;
                let axis = self.ints(&[axis as i64]);
                let inputs = std::iter::once(x).chain(ends).chain([axis]).collect();
                let name = self.emit("Slice", inputs, "Slice", vec![]);
                // A runtime cuts off what is beyond the tensor; Burn refuses it, and so does this shape.
                let sizes = self.sizes(part);
                let shape = self.list(&sizes, None);
                let zeros = vec![Attribute::Int("allowzero", 1)];
                self.put("Reshape", vec![name, shape], part, zeros);
                Ok(())
            }
            LoopPart::End {
                next,
                last,
                parts,
                collected,
                places,
                ..
            } => {
                let mut made = Vec::new();
                for (place, tensor) in next.iter().chain(parts).enumerate() {
                    // Behind the count.
                    let name = self.activation_operand(node, 1 + place, tensor)?;
                    made.push(self.info(tensor, name)?);
                }
                let names = self.end_step(made).ok_or("its step has not begun")?;
                let (states, all) = names.split_at(next.len());
                for (tensor, name) in last.iter().zip(states) {
                    self.set(tensor, name.clone());
                }
                for ((tensor, name), (axis, is_reversed)) in collected.iter().zip(all).zip(places) {
                    let name = self.joined(name.clone(), axis, is_reversed, tensor);
                    self.set(tensor, name);
                }
                Ok(())
            }
        }
    }

    fn info(&self, tensor: &TensorIr, name: String) -> Result<ValueInfo, Unwritten> {
        Ok(ValueInfo {
            element: self.element(tensor.dtype, &name)?,
            shape: self.open.dimensions(&self.sizes(tensor)),
            name,
        })
    }

    /// Where the part of this step starts and ends.
    fn bounds(&mut self, start: &Size, step: i64, length: &Size) -> Result<[String; 2], Unwritten> {
        let number = self.step().ok_or("its step has not begun")?;
        let one = self.ints(&[1]);
        let mut at = self.emit("Reshape", vec![number, one], "step", vec![]);
        if step != 1 {
            let step = self.ints(&[step]);
            at = self.emit("Mul", vec![at, step], "step", vec![]);
        }
        if *start != Size::Fixed(0) {
            let start = self.size(start);
            at = self.emit("Add", vec![at, start], "start", vec![]);
        }
        let length = self.size(length);
        let end = self.emit("Add", vec![at.clone(), length], "end", vec![]);
        Ok([at, end])
    }

    /// The parts of all steps, which are along an axis before the others, along one of their own.
    fn joined(
        &mut self,
        mut name: String,
        axis: usize,
        is_reversed: bool,
        to: &TensorIr,
    ) -> String {
        if is_reversed {
            name = self.slice(name, &[-1], &[i64::MIN + 1], &[0], &[-1]);
        }
        if axis > 0 {
            let (axis, rank) = (axis as i64, to.shape.num_dims() as i64);
            let axes = (1..=axis).chain([0]).chain(axis + 1..=rank);
            let axes = Attribute::Ints("perm", axes.collect());
            name = self.emit("Transpose", vec![name], "Transpose", vec![axes]);
        }
        self.reshape(name, to)
    }
}
