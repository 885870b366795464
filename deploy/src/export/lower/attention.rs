//! Scaled dot-product attention, spelled out.

use burn::backend::ir::AttentionOpIr;
use burn_lean_graph::Node;

use super::Written;
use crate::ElementType;
use crate::export::Writer;
use crate::export::open::Size;
use crate::onnx::Attribute;

impl Writer<'_> {
    /// softmax(softcap(q · kᵀ · scale), masked, + bias) · v
    ///
    /// A row that is masked whole gives zeros, as Burn's does: the softmax shifts by a number that
    /// is finite, and divides by one that is not zero.
    pub(super) fn attention(&mut self, o: &AttentionOpIr, node: Node<'_>) -> Written {
        let dtype = o.query.dtype;
        let head = o.query.shape[o.query.shape.num_dims() - 1];
        let scale: f64 = match o.options.scale {
            Some(scale) => scale.elem(),
            None => 1.0 / (head as f64).sqrt(),
        };
        let query = self.activation_operand(node, 0, &o.query)?;
        let key = self.activation_operand(node, 1, &o.key)?;
        let value = self.activation_operand(node, 2, &o.value)?;
        let transposed = vec![Attribute::Ints("perm", vec![0, 1, 3, 2])];
        let key = self.emit("Transpose", vec![key], "Transpose", transposed);
        let mut scores = self.emit("MatMul", vec![query, key], "scores", vec![]);
        let scale = self.number(scale, dtype)?;
        scores = self.emit("Mul", vec![scores, scale], "scores", vec![]);
        if let Some(softcap) = o.options.softcap {
            let cap = self.scalar(softcap, dtype)?;
            scores = self.emit("Div", vec![scores, cap.clone()], "scores", vec![]);
            scores = self.emit("Tanh", vec![scores], "scores", vec![]);
            scores = self.emit("Mul", vec![scores, cap], "scores", vec![]);
        }
        let masks = o.mask.is_some() || o.options.is_causal || o.attn_bias.is_some();
        let never = self.number(f64::NEG_INFINITY, dtype)?;
        if let Some(mask) = &o.mask {
            let mask = self.operand(mask)?;
            scores = self.emit("Where", vec![mask, never.clone(), scores], "scores", vec![]);
        }
        if o.options.is_causal {
            let rank = o.query.shape.num_dims();
            let sizes = [&o.query, &o.key].map(|tensor| self.sizes(tensor).remove(rank - 2));
            let mask = match sizes {
                // The last query sees every key.
                [Size::Fixed(rows), Size::Fixed(columns)] => {
                    let later = |row: usize, column: usize| column + rows > row + columns;
                    let mask =
                        (0..rows * columns).map(|i| u8::from(later(i / columns, i % columns)));
                    let mask = mask.collect();
                    self.initializer("later", ElementType::Bool, &[rows, columns], mask)
                }
                sizes => self.later(&sizes),
            };
            scores = self.emit("Where", vec![mask, never, scores], "scores", vec![]);
        }
        if let Some(bias) = &o.attn_bias {
            let bias = self.operand(bias)?;
            scores = self.emit("Add", vec![scores, bias], "scores", vec![]);
        }
        let weights = match masks {
            false => {
                let axis = vec![Attribute::Int("axis", -1)];
                self.emit("Softmax", vec![scores], "attention", axis)
            }
            true => {
                let finite = dtype.finfo().ok_or("its dtype is no float")?;
                let lowest = self.number(finite.min, dtype)?;
                let smallest = self.number(finite.min_positive, dtype)?;
                let last = [o.query.shape.num_dims() - 1];
                let most = self.reduce("ReduceMax", scores.clone(), Some(&last));
                let most = self.emit("Max", vec![most, lowest], "Max", vec![]);
                let shifted = self.emit("Sub", vec![scores, most], "Sub", vec![]);
                let powers = self.emit("Exp", vec![shifted], "Exp", vec![]);
                let sum = self.reduce("ReduceSum", powers.clone(), Some(&last));
                let sum = self.emit("Max", vec![sum, smallest], "Max", vec![]);
                self.emit("Div", vec![powers, sum], "attention", vec![])
            }
        };
        self.put("MatMul", vec![weights, value], &o.out, vec![]);
        Ok(())
    }

    /// Which keys come after which queries, of open lengths: both are counted from the last one back.
    fn later(&mut self, sizes: &[Size; 2]) -> String {
        let [rows, columns] = sizes.each_ref().map(|size| {
            let (count, size) = (self.count(size), self.size(size));
            self.emit("Sub", vec![count, size], "Sub", vec![])
        });
        let upright = self.ints(&[-1, 1]);
        let rows = self.emit("Reshape", vec![rows, upright], "Reshape", vec![]);
        self.emit("Greater", vec![columns, rows], "later", vec![])
    }
}
