//! Divisions by a constant of one number or by an open size, which rten makes products with its inverse of: they are
//! rounded twice, and infinite where the inverse is. Divisors that are otherwise computed stay as they are.

use std::collections::{HashMap, HashSet};
use std::f32::consts::SQRT_2;

use crate::onnx::Attribute;
use crate::{ElementType, Initializer, OnnxNode};

/// How far a number may be from that of a pattern for rten.
const NEAR: f32 = 1e-4;

/// Gives each of these divisions a divisor of as many numbers as there are to divide, and one more: of one alone
/// rten takes the inverse again.
///
/// A number whose inverse does as well stays, √2 where rten knows a GELU by it, and what scales the scores of an
/// attention, which rten makes part of their product. `outputs` are the names of the
/// results.
pub(super) fn write_out(
    nodes: &mut Vec<OnnxNode>,
    initializers: &mut Vec<Initializer>,
    outputs: &[&str],
) {
    let mut divisions = Divisions::among(initializers);
    *nodes = divisions.graph(std::mem::take(nodes), outputs);
    initializers.append(&mut divisions.added);
}

struct Divisions {
    /// Constants of one number.
    numbers: HashMap<String, f32>,
    /// Sizes without axes, which are computed, and those of them that are floats.
    sizes: HashSet<String>,
    floats: HashSet<String>,
    /// Lists of one whole number that were added.
    wholes: HashSet<i64>,
    added: Vec<Initializer>,
}

impl Divisions {
    fn among(initializers: &[Initializer]) -> Self {
        let number = |one: &Initializer| match one.bytes[..] {
            [a, b, c, d] if one.element == ElementType::F32 => {
                Some((one.name.clone(), f32::from_le_bytes([a, b, c, d])))
            }
            _ => None,
        };
        Self {
            numbers: initializers.iter().filter_map(number).collect(),
            sizes: HashSet::new(),
            floats: HashSet::new(),
            wholes: HashSet::new(),
            added: Vec::new(),
        }
    }

    /// The nodes of a graph, or of the step of a loop.
    fn graph(&mut self, nodes: Vec<OnnxNode>, outputs: &[&str]) -> Vec<OnnxNode> {
        let mut kept = self.of_gelus(&nodes, outputs);
        kept.extend(self.of_products(&nodes, outputs));
        let mut written = Vec::with_capacity(nodes.len());
        for (at, mut node) in nodes.into_iter().enumerate() {
            self.note(&node);
            for attribute in &mut node.attributes {
                if let Attribute::Body(_, body) = attribute {
                    let nodes = std::mem::take(&mut body.nodes);
                    let outputs = body.outputs.iter().map(|info| info.name.as_str());
                    body.nodes = self.graph(nodes, &outputs.collect::<Vec<_>>());
                }
            }
            let by = match kept.contains(&at) {
                true => None,
                false => self.divisor(&node),
            };
            match by {
                Some(by) => written.extend(self.division(&node, &by)),
                None => written.push(node),
            }
        }
        written
    }

    /// What is known of the results of a node.
    fn note(&mut self, node: &OnnxNode) {
        let ([x, ..], [out]) = (&node.inputs[..], &node.outputs[..]) else {
            return;
        };
        let to_floats = Attribute::Int("to", ElementType::F32 as i64);
        match node.operator {
            // An export makes numbers of lists of one so.
            "Squeeze" => drop(self.sizes.insert(out.clone())),
            "Cast" if self.sizes.contains(x) && node.attributes.contains(&to_floats) => {
                self.floats.insert(out.clone());
            }
            _ => {}
        }
    }

    /// The number that a node divides by, without axes.
    fn divisor(&mut self, node: &OnnxNode) -> Option<String> {
        let [_, by] = &node.inputs[..] else {
            return None;
        };
        if node.operator != "Div" {
            return None;
        }
        if self.floats.contains(by) {
            return Some(by.clone());
        }
        let number = *self.numbers.get(by)?;
        if has_good_inverse(number) {
            return None;
        }
        let name = format!("{} divisor", node.outputs[0]);
        let bytes = number.to_le_bytes().to_vec();
        self.add(name.clone(), ElementType::F32, Vec::new(), bytes);
        Some(name)
    }

    fn add(&mut self, name: String, element: ElementType, shape: Vec<usize>, bytes: Vec<u8>) {
        self.added.push(Initializer {
            path: name.clone(),
            name,
            element,
            shape,
            bytes,
        });
    }

    /// A list of one whole number.
    fn whole(&mut self, number: i64) -> String {
        let name = format!("division {number}");
        if self.wholes.insert(number) {
            let bytes = number.to_le_bytes().to_vec();
            self.add(name.clone(), ElementType::I64, vec![1], bytes);
        }
        name
    }

    fn division(&mut self, node: &OnnxNode, by: &str) -> [OnnxNode; 9] {
        let [start, one, last] = [0, 1, -1].map(|number| self.whole(number));
        let (x, out) = (&node.inputs[0], &node.outputs[0]);
        let value = |name: &str| format!("{out} {name}");
        let [shape, list, first] = ["shape", "list", "first"].map(value);
        let [more, count, divisors] = ["more", "count", "divisors"].map(value);
        let [quotients, rest] = ["quotients", "rest"].map(value);
        let made = |operator: &'static str, inputs: &[&str], output: &str, attributes| OnnxNode {
            name: format!("{operator} {output}"),
            operator,
            domain: "",
            inputs: inputs.iter().map(|name| String::from(*name)).collect(),
            outputs: vec![output.into()],
            attributes,
        };
        let (along, empty) = (Attribute::Int("axis", 0), Attribute::Int("allowzero", 1));
        [
            made("Shape", &[x], &shape, vec![]),
            made("Reshape", &[x, &last], &list, vec![]),
            made("Slice", &[&list, &start, &one], &first, vec![]),
            made("Concat", &[&list, &first], &more, vec![along]),
            made("Shape", &[&more], &count, vec![]),
            made("Expand", &[by, &count], &divisors, vec![]),
            made("Div", &[&more, &divisors], &quotients, vec![]),
            made("Slice", &[&quotients, &start, &last], &rest, vec![]),
            made("Reshape", &[&rest, &shape], out, vec![empty]),
        ]
    }

    /// The places of the divisions by √2 in what rten computes as one GELU: x · (erf(x / √2) + 1) · 0.5, its factors
    /// in any order.
    fn of_gelus(&self, nodes: &[OnnxNode], outputs: &[&str]) -> HashSet<usize> {
        if nodes.iter().all(|node| node.operator != "Erf") {
            return HashSet::new();
        }
        let uses = Uses::of(nodes, outputs);
        let all = nodes.iter().enumerate();
        let gelus = all.filter(|(_, node)| self.is_of_gelu(node, &uses).unwrap_or(false));
        gelus.map(|(at, _)| at).collect()
    }

    /// The places of the divisions that rten makes part of a product of two computed matrices, before or behind it.
    fn of_products(&self, nodes: &[OnnxNode], outputs: &[&str]) -> HashSet<usize> {
        if nodes.iter().all(|node| node.operator != "MatMul") {
            return HashSet::new();
        }
        let uses = Uses::of(nodes, outputs);
        let is_scale = |node: &OnnxNode| {
            let [x, by] = &node.inputs[..] else {
                return false;
            };
            let has_inverse = self
                .numbers
                .get(by)
                .is_some_and(|by| by.recip().is_normal());
            let is_product = uses.made(x).is_some_and(|made| made.operator == "MatMul");
            let is_behind = is_product && uses.sole(x, "Div").is_some();
            let is_before = || uses.sole(&node.outputs[0], "MatMul").is_some();
            node.operator == "Div" && has_inverse && (is_behind || is_before())
        };
        let all = nodes.iter().enumerate();
        let scales = all.filter(|(_, node)| is_scale(node));
        scales.map(|(at, _)| at).collect()
    }

    fn is_of_gelu(&self, node: &OnnxNode, uses: &Uses<'_>) -> Option<bool> {
        let is = |name: &str, number: f32| {
            let found = self.numbers.get(name);
            found.is_some_and(|found| (found - number).abs() <= NEAR)
        };
        let [x, by] = &node.inputs[..] else {
            return None;
        };
        if node.operator != "Div" || !is(by, SQRT_2) {
            return None;
        }
        let erf = uses.sole(&node.outputs[0], "Erf")?;
        let sum = uses.sole(&erf.outputs[0], "Add")?;
        if !is(sum.other(&erf.outputs[0])?, 1.0) {
            return None;
        }
        let product = uses.sole(&sum.outputs[0], "Mul")?;
        let factor = product.other(&sum.outputs[0])?;
        if factor != x && !is(factor, 0.5) {
            // Of x and a half before.
            let half = uses.made(factor).filter(|half| half.operator == "Mul")?;
            return Some(is(half.other(x)?, 0.5) && uses.sole(factor, "Mul").is_some());
        }
        let last = uses.sole(&product.outputs[0], "Mul")?;
        let left = last.other(&product.outputs[0])?;
        Some(match factor == x {
            true => is(left, 0.5),
            false => left == x,
        })
    }
}

/// Whether a product with the inverse is the quotient: of powers of two, and of what has no finite inverse other than 0.
fn has_good_inverse(number: f32) -> bool {
    const FRACTION: u32 = (1 << (f32::MANTISSA_DIGITS - 1)) - 1;
    let is_power = number.is_normal() && number.to_bits() & FRACTION == 0;
    is_power || number == 0.0 || !number.is_finite()
}

/// Which nodes make and read which values.
struct Uses<'a> {
    nodes: &'a [OnnxNode],
    makers: HashMap<&'a str, usize>,
    readers: HashMap<&'a str, Vec<usize>>,
}

impl<'a> Uses<'a> {
    fn of(nodes: &'a [OnnxNode], outputs: &[&'a str]) -> Self {
        let (mut makers, mut readers) = (HashMap::new(), HashMap::new());
        for (at, node) in nodes.iter().enumerate() {
            makers.extend(node.outputs.iter().map(|name| (name.as_str(), at)));
            for name in node.reads() {
                let readers: &mut Vec<usize> = readers.entry(name).or_default();
                readers.push(at);
            }
        }
        // As if another one read it.
        for name in outputs.iter().copied() {
            readers.entry(name).or_default().push(nodes.len());
        }
        Self {
            nodes,
            makers,
            readers,
        }
    }

    fn made(&self, name: &str) -> Option<&'a OnnxNode> {
        self.nodes.get(*self.makers.get(name)?)
    }

    /// The one node that reads a value, which is no result, if this is its operator.
    fn sole(&self, name: &str, operator: &str) -> Option<&'a OnnxNode> {
        let [reader] = self.readers.get(name)?[..] else {
            return None;
        };
        let node = self.nodes.get(reader)?;
        (node.operator == operator).then_some(node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_have_an_inverse_that_does_as_well() {
        let good = [2.0, -0.25, 0.0, f32::INFINITY, f32::powi(2.0, 127)];
        assert!(good.into_iter().all(has_good_inverse));
        // The inverse of the smallest ones is infinite.
        let bad = [3.0, 0.1, 1e-40, f32::from_bits(1)];
        assert!(!bad.into_iter().any(has_good_inverse));
    }

    fn node(operator: &'static str, inputs: [&str; 2], output: &str) -> OnnxNode {
        let inputs = inputs.into_iter().filter(|name| !name.is_empty());
        OnnxNode {
            name: output.into(),
            operator,
            domain: "",
            inputs: inputs.map(String::from).collect(),
            outputs: vec![output.into()],
            attributes: Vec::new(),
        }
    }

    /// How many nodes these are, and how many become of them.
    fn written(mut nodes: Vec<OnnxNode>, outputs: &[&str]) -> (usize, usize) {
        let numbers = [("root", SQRT_2), ("one", 1.0), ("half", 0.5), ("two", 2.0)];
        let constant = |(name, number): (&str, f32)| Initializer {
            name: name.into(),
            path: name.into(),
            element: ElementType::F32,
            shape: vec![1, 1],
            bytes: number.to_le_bytes().to_vec(),
        };
        let mut initializers: Vec<Initializer> = numbers.map(constant).to_vec();
        let before = nodes.len();
        write_out(&mut nodes, &mut initializers, outputs);
        (before, nodes.len())
    }

    #[test]
    fn the_scale_of_a_product_of_matrices_stays() {
        let behind = vec![
            node("MatMul", ["q", "k"], "scores"),
            node("Div", ["scores", "root"], "y"),
        ];
        assert_eq!(written(behind.clone(), &["y"]), (2, 2));
        // Scores that are a result, too, are no part of another product.
        assert_eq!(written(behind, &["y", "scores"]), (2, 10));
        let before = vec![
            node("Div", ["q", "root"], "scaled"),
            node("MatMul", ["scaled", "k"], "y"),
        ];
        assert_eq!(written(before, &["y"]), (2, 2));
        let other = vec![
            node("Add", ["a", "b"], "sum"),
            node("Div", ["sum", "root"], "y"),
        ];
        assert_eq!(written(other, &["y"]), (2, 10));
    }

    #[test]
    fn a_gelu_by_hand_stays_one() {
        let erf = || {
            vec![
                node("Div", ["x", "root"], "scaled"),
                node("Erf", ["scaled", ""], "erf"),
                node("Add", ["one", "erf"], "sum"),
            ]
        };
        let orders = [
            [["x", "sum"], ["half", "product"]],
            [["sum", "half"], ["product", "x"]],
            [["x", "half"], ["product", "sum"]],
        ];
        for [first, second] in orders {
            let mut nodes = erf();
            nodes.push(node("Mul", first, "product"));
            nodes.push(node("Mul", second, "y"));
            assert_eq!(written(nodes.clone(), &["y"]), (5, 5));
            // Of a part that is a result, too, rten makes none.
            assert_eq!(written(nodes, &["y", "erf"]), (5, 13));
        }
        let mut nodes = erf();
        nodes.push(node("Mul", ["sum", "x"], "product"));
        nodes.push(node("Mul", ["product", "one"], "y"));
        assert_eq!(written(nodes, &["y"]), (5, 13));
        let nodes = vec![node("Div", ["x", "two"], "y")];
        assert_eq!(written(nodes, &["y"]), (1, 1));
    }
}
