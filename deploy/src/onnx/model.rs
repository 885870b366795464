//! An ONNX model in memory, and as bytes.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use burn_lean_reparam::Files;

use super::protobuf::Message;
use crate::{DeployError, DynamicGrid};

/// The version of ONNX's operators that files are written in.
pub(crate) const OPSET: i64 = 21;
/// The version of ONNX's file format that came with it.
const IR_VERSION: i64 = 10;

/// Types of elements, with ONNX's numbers for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementType {
    /// `FLOAT`.
    F32 = 1,
    /// `UINT8`.
    U8 = 2,
    /// `INT8`.
    I8 = 3,
    /// `UINT16`.
    U16 = 4,
    /// `INT16`.
    I16 = 5,
    /// `INT32`.
    I32 = 6,
    /// `INT64`.
    I64 = 7,
    /// `BOOL`.
    Bool = 9,
    /// `FLOAT16`.
    F16 = 10,
    /// `DOUBLE`.
    F64 = 11,
    /// `UINT32`.
    U32 = 12,
    /// `UINT64`.
    U64 = 13,
    /// `BFLOAT16`.
    BF16 = 16,
    /// `UINT4`, two in a byte.
    U4 = 21,
    /// `INT4`, two in a byte.
    I4 = 22,
}

/// An attribute of a node.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Attribute {
    Int(&'static str, i64),
    Float(&'static str, f32),
    Ints(&'static str, Vec<i64>),
    Text(&'static str, &'static str),
    /// A tensor of one element.
    Element(&'static str, ElementType, Vec<u8>),
    /// What a loop computes in each step.
    Body(&'static str, Box<Body>),
    /// Of an operator of the engine, which is in no file.
    Grid(DynamicGrid),
}

/// The nodes of a loop's step, which read what is made outside by its name, too.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Body {
    pub(crate) nodes: Vec<OnnxNode>,
    pub(crate) inputs: Vec<ValueInfo>,
    pub(crate) outputs: Vec<ValueInfo>,
}

impl Body {
    /// What its nodes read that none of them makes, without its inputs: each name once.
    pub(crate) fn captured(&self) -> Vec<&str> {
        let inputs = self.inputs.iter().map(|input| &input.name);
        let made = self.nodes.iter().flat_map(|node| &node.outputs);
        let mut known: HashSet<&str> = inputs.chain(made).map(String::as_str).collect();
        known.insert("");
        let mut captured = Vec::new();
        for name in self.nodes.iter().flat_map(OnnxNode::reads) {
            if known.insert(name) {
                captured.push(name);
            }
        }
        captured
    }
}

/// An operation of an [`OnnxModel`].
#[derive(Debug, Clone, PartialEq)]
pub struct OnnxNode {
    pub(crate) name: String,
    pub(crate) operator: &'static str,
    pub(crate) domain: &'static str,
    pub(crate) inputs: Vec<String>,
    pub(crate) outputs: Vec<String>,
    pub(crate) attributes: Vec<Attribute>,
}

impl OnnxNode {
    /// The names of its operands, and of what its loop's step reads from outside.
    pub(crate) fn reads(&self) -> Vec<&str> {
        let inputs = self.inputs.iter().map(String::as_str);
        let captured = self.body().into_iter().flat_map(Body::captured);
        inputs.chain(captured).collect()
    }

    /// What it computes in each step, if it is a loop.
    pub(crate) fn body(&self) -> Option<&Body> {
        let mut attributes = self.attributes.iter();
        attributes.find_map(|attribute| match attribute {
            Attribute::Body(_, body) => Some(&**body),
            _ => None,
        })
    }

    /// Of two operands, the one that is not this one.
    #[cfg(feature = "engine")]
    pub(crate) fn other(&self, name: &str) -> Option<&str> {
        match &self.inputs[..] {
            [a, b] if a == name => Some(b),
            [a, b] if b == name => Some(a),
            _ => None,
        }
    }

    /// ONNX's name of the operator, `Conv` for example.
    pub fn operator(&self) -> &str {
        self.operator
    }

    /// Names of its operands; empty for one that is left out.
    pub fn inputs(&self) -> &[String] {
        &self.inputs
    }

    /// Names of its results.
    pub fn outputs(&self) -> &[String] {
        &self.outputs
    }
}

/// A constant of an [`OnnxModel`]: a parameter, or what is computed from parameters alone.
#[derive(Debug, Clone, PartialEq)]
pub struct Initializer {
    pub(crate) name: String,
    /// Its name as long as no other has it: the path of a parameter that is written in several forms.
    pub(crate) path: String,
    pub(crate) element: ElementType,
    pub(crate) shape: Vec<usize>,
    /// Little endian, row-major.
    pub(crate) bytes: Vec<u8>,
}

impl Initializer {
    /// Its name: the path of the parameter, where it is one.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its elements, row-major, little endian; those of 4 bits two in a byte, low half first.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A size along an axis of an input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dimension {
    /// Always this one.
    Fixed(usize),
    /// Any, as it is written in the file: `batch`, the name of an [`OpenAxis`](crate::OpenAxis), or what is
    /// computed from them, as `4*batch*sequence` or `sequence + 1`. A size of another kind, as that behind a
    /// convolution with a stride, is `open_` and a number.
    Open(String),
}

/// An input or output of an [`OnnxModel`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueInfo {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub element: ElementType,
    /// Its shape.
    pub shape: Vec<Dimension>,
}

/// A model in ONNX's operators (opset 21).
#[derive(Debug, Clone, PartialEq)]
pub struct OnnxModel {
    pub(crate) nodes: Vec<OnnxNode>,
    pub(crate) initializers: Vec<Initializer>,
    pub(crate) inputs: Vec<ValueInfo>,
    pub(crate) outputs: Vec<ValueInfo>,
}

impl OnnxModel {
    /// The operations, in an order in which they can be computed.
    pub fn nodes(&self) -> &[OnnxNode] {
        &self.nodes
    }

    /// The constants.
    pub fn initializers(&self) -> &[Initializer] {
        &self.initializers
    }

    /// The inputs, in the order of the forward pass.
    pub fn inputs(&self) -> &[ValueInfo] {
        &self.inputs
    }

    /// The outputs, in the order of the forward pass.
    pub fn outputs(&self) -> &[ValueInfo] {
        &self.outputs
    }

    #[cfg(feature = "engine")]
    pub(crate) fn has_loops(&self) -> bool {
        self.nodes.iter().any(|node| node.body().is_some())
    }

    /// Bytes of all constants.
    pub fn constant_bytes(&self) -> usize {
        self.initializers.iter().map(|i| i.bytes.len()).sum()
    }

    /// As an ONNX file has it.
    ///
    /// # Errors
    ///
    /// [`DeployError::TooLarge`] for 2 GiB or more, which protobuf cannot hold.
    pub fn to_bytes(&self) -> Result<Vec<u8>, DeployError> {
        let limit = i32::MAX as usize;
        if self.constant_bytes() > limit {
            return Err(DeployError::TooLarge {
                bytes: self.constant_bytes(),
            });
        }
        let graph = graph("burn-lean", &self.nodes, &self.inputs, &self.outputs);
        let mut model = Message::default();
        model.int(1, IR_VERSION);
        model.text(2, "burn-lean");
        model.text(3, env!("CARGO_PKG_VERSION"));
        model.ending(7, &graph, 5, &heads(&self.initializers));
        let in_loops = self.nodes.iter().filter_map(OnnxNode::body);
        let in_loops = in_loops.flat_map(|body| &body.nodes);
        let nodes = self.nodes.iter().chain(in_loops);
        let domains: HashSet<&str> = nodes.map(|node| node.domain).collect();
        model.message(8, &opset("", OPSET));
        if domains.contains(MICROSOFT) {
            model.message(8, &opset(MICROSOFT, 1));
        }
        let bytes = model.into_bytes();
        match bytes.len() > limit {
            true => Err(DeployError::TooLarge { bytes: bytes.len() }),
            false => Ok(bytes),
        }
    }

    /// Writes the file; what was there before stays until the new one is complete. Returns its
    /// length in bytes.
    ///
    /// # Errors
    ///
    /// As [`to_bytes`](Self::to_bytes), and [`DeployError::File`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<u64, DeployError> {
        const FILES: Files<DeployError> = Files(|_, path, error| DeployError::File {
            path: path.to_path_buf(),
            reason: error.to_string(),
        });
        let bytes = self.to_bytes()?;
        FILES.write(path.as_ref(), &bytes)?;
        Ok(bytes.len() as u64)
    }
}

/// Nodes, inputs and outputs under a name.
fn graph(name: &str, nodes: &[OnnxNode], inputs: &[ValueInfo], outputs: &[ValueInfo]) -> Message {
    let mut graph = Message::default();
    for node in nodes {
        graph.message(1, &node.encode());
    }
    graph.text(2, name);
    for (field, values) in [(11, inputs), (12, outputs)] {
        for value in values {
            graph.message(field, &value.encode());
        }
    }
    graph
}

/// Some nodes with the constants that they read, as a model of their own: inputs and outputs by name
/// alone.
#[cfg(feature = "engine")]
pub(crate) fn part(
    nodes: &[OnnxNode],
    initializers: &[Initializer],
    inputs: &[&str],
    outputs: &[&str],
) -> Vec<u8> {
    let mut graph = Message::default();
    for node in nodes {
        graph.message(1, &node.encode());
    }
    graph.text(2, "part");
    for (field, names) in [(11, inputs), (12, outputs)] {
        for name in names {
            let mut value = Message::default();
            value.text(1, name);
            graph.message(field, &value);
        }
    }
    let mut model = Message::default();
    model.int(1, IR_VERSION);
    model.ending(7, &graph, 5, &heads(initializers));
    model.message(8, &opset("", OPSET));
    model.message(8, &opset(MICROSOFT, 1));
    model.into_bytes()
}

/// The domain of the operators that ONNX Runtime has beside ONNX's.
pub(crate) const MICROSOFT: &str = "com.microsoft";

/// Of operators that this crate's engine has; they are in no file.
pub(crate) const ENGINE: &str = "burn_lean";

fn opset(domain: &str, version: i64) -> Message {
    let mut opset = Message::default();
    opset.text(1, domain);
    opset.int(2, version);
    opset
}

impl OnnxNode {
    fn encode(&self) -> Message {
        let mut node = Message::default();
        for input in &self.inputs {
            node.text(1, input);
        }
        for output in &self.outputs {
            node.text(2, output);
        }
        node.text(3, &self.name);
        node.text(4, self.operator);
        for attribute in &self.attributes {
            node.message(5, &attribute.encode());
        }
        if !self.domain.is_empty() {
            node.text(7, self.domain);
        }
        node
    }
}

impl Attribute {
    fn encode(&self) -> Message {
        let mut attribute = Message::default();
        let kind = match self {
            Self::Float(name, value) => {
                attribute.text(1, name);
                attribute.float(2, *value);
                1
            }
            Self::Int(name, value) => {
                attribute.text(1, name);
                attribute.int(3, *value);
                2
            }
            Self::Text(name, value) => {
                attribute.text(1, name);
                attribute.text(4, value);
                3
            }
            Self::Element(name, element, bytes) => {
                attribute.text(1, name);
                let mut tensor = Message::default();
                tensor.int(1, 1);
                tensor.int(2, *element as i64);
                tensor.bytes(9, bytes);
                attribute.message(5, &tensor);
                4
            }
            Self::Ints(name, values) => {
                attribute.text(1, name);
                attribute.ints(8, values.iter().copied());
                7
            }
            Self::Body(name, body) => {
                attribute.text(1, name);
                attribute.message(6, &graph(name, &body.nodes, &body.inputs, &body.outputs));
                5
            }
            Self::Grid(grid) => {
                attribute.text(1, "grid");
                attribute.text(4, &format!("{grid:?}"));
                3
            }
        };
        attribute.int(20, kind);
        attribute
    }
}

impl Initializer {
    /// All but its bytes, which end it.
    fn head(&self) -> Message {
        let mut tensor = Message::default();
        tensor.ints(1, self.shape.iter().map(|size| *size as i64));
        tensor.int(2, self.element as i64);
        tensor.text(8, &self.name);
        tensor.length(9, self.bytes.len());
        tensor
    }
}

fn heads(initializers: &[Initializer]) -> Vec<(Message, &[u8])> {
    let parts = initializers.iter();
    parts.map(|one| (one.head(), &one.bytes[..])).collect()
}

impl ValueInfo {
    fn encode(&self) -> Message {
        let mut shape = Message::default();
        for dimension in &self.shape {
            let mut size = Message::default();
            match dimension {
                Dimension::Fixed(fixed) => size.int(1, *fixed as i64),
                Dimension::Open(name) => size.text(2, name),
            }
            shape.message(1, &size);
        }
        let mut tensor = Message::default();
        tensor.int(1, self.element as i64);
        tensor.message(2, &shape);
        let mut kind = Message::default();
        kind.message(1, &tensor);
        let mut value = Message::default();
        value.text(1, &self.name);
        value.message(2, &kind);
        value
    }
}

impl OnnxModel {
    /// Leaves out what no output needs: copies under another name, nodes and constants that nothing
    /// reads.
    pub(crate) fn tidy(&mut self) {
        // Outputs that are a copy of what one node makes and nothing else reads take its place.
        let mut readers: HashMap<String, usize> = HashMap::new();
        for input in self.nodes.iter().flat_map(OnnxNode::reads) {
            *readers.entry(input.into()).or_default() += 1;
        }
        let mut renamed: HashMap<String, String> = HashMap::new();
        let made: HashSet<String> = self.nodes.iter().flat_map(|n| n.outputs.clone()).collect();
        self.nodes.retain(|node| {
            let [from] = &node.inputs[..] else {
                return true;
            };
            let copies = node.operator == "Identity" && made.contains(from) && readers[from] == 1;
            if copies {
                renamed.insert(from.clone(), node.outputs[0].clone());
            }
            !copies
        });
        for node in &mut self.nodes {
            for output in &mut node.outputs {
                if let Some(name) = renamed.get(output) {
                    *output = name.clone();
                }
            }
        }
        let mut needed: HashSet<String> = self.outputs.iter().map(|o| o.name.clone()).collect();
        let mut kept = Vec::with_capacity(self.nodes.len());
        for node in std::mem::take(&mut self.nodes).into_iter().rev() {
            if node.outputs.iter().any(|output| needed.contains(output)) {
                needed.extend(node.reads().into_iter().map(String::from));
                kept.push(node);
            }
        }
        kept.reverse();
        self.nodes = kept;
        self.initializers.retain(|one| needed.contains(&one.name));
    }
}
