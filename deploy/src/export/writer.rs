//! Nodes, names and constants of a model that is being written.

mod steps;

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{ScalarIr, TensorId, TensorIr, TensorStatus};
use burn::tensor::{DType, Shape};
use burn_lean_graph::Graph;

use steps::Around;

use super::data::HostTensor;
use super::open::{Known, Number, Open, Size};
use super::products::LayerReport;
use super::weights::Weights;
use super::{Exported, Form, Limits, element};
use crate::onnx::Attribute;
use crate::{DeployError, ElementType, Initializer, OnnxModel, OnnxNode, Quantization, ValueInfo};

/// A model that is being written.
pub(crate) struct Writer<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) quantization: &'a Quantization,
    pub(crate) weights: &'a Weights,
    pub(crate) form: Form,
    pub(crate) inputs: Vec<ValueInfo>,
    pub(crate) layers: Vec<LayerReport>,
    /// Results of batch normalizations that are part of the convolution before them.
    pub(crate) folded: HashSet<TensorId>,
    pub(crate) limits: Limits,
    pub(crate) open: &'a Open,
    nodes: Vec<OnnxNode>,
    /// Results of nodes, by what these compute: of equal ones there is one.
    computed: HashMap<String, Vec<String>>,
    initializers: Vec<Initializer>,
    /// Names that are taken.
    names: HashSet<String>,
    /// The number that the next tensor of a name tries first: of a loop over time there are thousands.
    numbers: HashMap<String, usize>,
    /// Names of tensors of the graph.
    of: HashMap<TensorId, String>,
    /// Names of constants that are written once, by what they are.
    once: HashMap<String, String>,
    /// What surrounds the loop whose step is being written.
    around: Option<Around>,
    /// Paths of parameters, and the nodes that make other tensors.
    paths: HashMap<TensorId, &'a str>,
    makers: HashMap<TensorId, usize>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(
        graph: &'a Graph,
        open: &'a Open,
        quantization: &'a Quantization,
        weights: &'a Weights,
        form: Form,
    ) -> Self {
        // Of several the first.
        let (mut paths, mut makers) = (HashMap::new(), HashMap::new());
        for parameter in graph.parameters() {
            paths.entry(parameter.tensor).or_insert(&*parameter.path);
        }
        for node in graph.nodes() {
            for out in node.operation().outputs() {
                makers.entry(out.id).or_insert(node.index());
            }
        }
        Self {
            graph,
            quantization,
            weights,
            form,
            inputs: Vec::new(),
            layers: Vec::new(),
            folded: HashSet::new(),
            limits: Limits::default(),
            open,
            nodes: Vec::new(),
            computed: HashMap::new(),
            initializers: Vec::new(),
            names: HashSet::new(),
            numbers: HashMap::new(),
            of: HashMap::new(),
            once: HashMap::new(),
            around: None,
            paths,
            makers,
        }
    }

    pub(crate) fn name_input(&mut self, id: TensorId) -> String {
        let name = self.unique("input");
        self.of.insert(id, name.clone());
        name
    }

    /// `name`, or with a number where it is taken.
    pub(crate) fn unique(&mut self, name: &str) -> String {
        // Of a model that is a parameter itself, whose path is empty; ONNX takes no such name.
        let name = if name.is_empty() { "parameter" } else { name };
        let number = self.numbers.entry(name.to_string()).or_default();
        loop {
            let unique = match *number {
                0 => name.to_string(),
                number => format!("{name}_{number}"),
            };
            *number += 1;
            if self.names.insert(unique.clone()) {
                return unique;
            }
        }
    }

    /// Whether a tensor is a constant of the model.
    pub(crate) fn constant(&self, tensor: &TensorIr) -> Option<&'a HostTensor> {
        self.weights.constants.get(&tensor.id)
    }

    /// The name of an operand; a constant is written at its first use.
    pub(crate) fn operand(&mut self, tensor: &TensorIr) -> Result<String, DeployError> {
        if let Some(name) = self.of.get(&tensor.id) {
            return Ok(name.clone());
        }
        if let Some((start, step)) = self.open.counted(tensor.id) {
            let name = self.counted(tensor, start, *step)?;
            self.set(tensor, name.clone());
            return Ok(name);
        }
        let Some(value) = self.constant(tensor) else {
            return Err(DeployError::Operator {
                operation: "random",
                module: "?".into(),
                why: format!("tensor {} is not computed in the forward pass", tensor.id),
            });
        };
        let path = self.constant_name(tensor.id);
        let name = self.unique(&path);
        let element = self.element(value.dtype, &name)?;
        let bytes = value.encode(element)?;
        self.initializers.push(Initializer {
            name: name.clone(),
            path,
            element,
            shape: value.shape.clone(),
            bytes,
        });
        self.of.insert(tensor.id, name.clone());
        Ok(name)
    }

    /// The path of a parameter; for what is computed from parameters, of the first of them.
    pub(crate) fn constant_name(&self, id: TensorId) -> String {
        if let Some(path) = self.paths.get(&id) {
            return (*path).to_string();
        }
        let Some(maker) = self.makers.get(&id) else {
            return "constant".into();
        };
        let node = self.graph.node(*maker);
        match node.parameters().next() {
            Some(parameter) if node.is_view() => parameter.path.clone(),
            Some(parameter) => format!("{}.{}", parameter.path, node.name()),
            None => format!("constant.{}", node.name()),
        }
    }

    /// A constant of the file's own; small ones that are equal share a name.
    pub(crate) fn initializer(
        &mut self,
        name: &str,
        element: ElementType,
        shape: &[usize],
        bytes: Vec<u8>,
    ) -> String {
        let is_small = bytes.len() <= 64;
        let key = is_small.then(|| format!("{element:?} {shape:?} {bytes:?}"));
        if let Some(same) = key.as_ref().and_then(|key| self.once.get(key)) {
            return same.clone();
        }
        let name = self.unshared(name, element, shape, bytes);
        if let Some(key) = key {
            self.once.insert(key, name.clone());
        }
        name
    }

    /// A constant with a name of its own. Codes of weights have one: equal ones with other scales are other weights,
    /// and a product that reads them is another product.
    pub(crate) fn unshared(
        &mut self,
        name: &str,
        element: ElementType,
        shape: &[usize],
        bytes: Vec<u8>,
    ) -> String {
        let path = name.to_string();
        let name = self.unique(name);
        self.initializers.push(Initializer {
            name: name.clone(),
            path,
            element,
            shape: shape.to_vec(),
            bytes,
        });
        name
    }

    /// What a recorded dtype is written as.
    pub(crate) fn element(&self, dtype: DType, what: &str) -> Result<ElementType, DeployError> {
        use ElementType::{I8, I16, I32, U8, U16};
        Ok(match element(dtype, what)? {
            I8 | I16 | U8 | U16 if self.limits.wide_integers => I32,
            element => element,
        })
    }

    pub(crate) fn ints(&mut self, values: &[i64]) -> String {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        let bytes = bytes.collect();
        self.initializer("ints", ElementType::I64, &[values.len()], bytes)
    }

    pub(crate) fn floats(&mut self, name: &str, shape: &[usize], values: &[f32]) -> String {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        let bytes = bytes.collect();
        self.initializer(name, ElementType::F32, shape, bytes)
    }

    /// A number as a tensor without axes, of a dtype.
    pub(crate) fn scalar(&mut self, value: ScalarIr, dtype: DType) -> Result<String, DeployError> {
        let element = self.element(dtype, "a number")?;
        let bytes = scalar_bytes(value, element);
        Ok(self.initializer("number", element, &[], bytes))
    }

    /// A whole number, which may be a size, as a tensor without axes.
    fn whole(&mut self, number: &Number, dtype: DType) -> Result<String, DeployError> {
        let (is_negative, size) = match number {
            Number::Fixed(number) => return self.scalar(ScalarIr::Int(*number), dtype),
            Number::Open { is_negative, size } => (*is_negative, size),
        };
        let size = self.size(size);
        let size = self.times(size, if is_negative { -1 } else { 1 });
        let name = self.emit("Squeeze", vec![size], "size", vec![]);
        Ok(match self.element(dtype, "a size")? {
            ElementType::I64 => name,
            other => self.cast_to(name, other),
        })
    }

    /// The number of an operation with this result.
    pub(crate) fn scalar_for(
        &mut self,
        result: &TensorIr,
        value: ScalarIr,
        dtype: DType,
    ) -> Result<String, DeployError> {
        match self.open.scalar(result.id) {
            Some(number) => self.whole(number, dtype),
            None => self.scalar(value, dtype),
        }
    }

    pub(crate) fn number(&mut self, value: f64, dtype: DType) -> Result<String, DeployError> {
        self.scalar(ScalarIr::Float(value), dtype)
    }

    /// The sizes of a tensor.
    pub(crate) fn sizes(&self, tensor: &TensorIr) -> Vec<Size> {
        self.open.sizes(tensor.id, &tensor.shape.to_vec())
    }

    /// A shape as an operand: a constant, or computed from open sizes.
    pub(crate) fn shape(&mut self, tensor: &TensorIr) -> String {
        let sizes = self.sizes(tensor);
        self.list(&sizes, None)
    }

    /// Sizes as a list; the one at `found` is -1.
    pub(crate) fn list(&mut self, sizes: &[Size], found: Option<usize>) -> String {
        let mut parts = Vec::new();
        let mut run = Vec::new();
        for (place, size) in sizes.iter().enumerate() {
            match size {
                _ if found == Some(place) => run.push(-1),
                Size::Fixed(size) => run.push(*size as i64),
                Size::Open(..) => {
                    if !run.is_empty() {
                        parts.push(self.ints(&std::mem::take(&mut run)));
                    }
                    parts.push(self.size(size));
                }
            }
        }
        if !run.is_empty() || parts.is_empty() {
            parts.push(self.ints(&run));
        }
        if let [part] = &parts[..] {
            return part.clone();
        }
        let axis = vec![Attribute::Int("axis", 0)];
        self.emit("Concat", parts, "shape", axis)
    }

    /// A size, as a list of one number.
    pub(crate) fn size(&mut self, size: &Size) -> String {
        let (times, factors) = match size {
            Size::Fixed(size) => return self.ints(&[*size as i64]),
            Size::Open(times, factors) => (*times as i64, factors),
        };
        let known = factors.iter().map(|at| self.known(*at));
        let known: Vec<String> = known.collect();
        let product = known.into_iter().reduce(|a, b| self.sizes_of("Mul", a, b));
        self.times(product.unwrap_or_default(), times)
    }

    /// A size that is known, as a list of one number.
    fn known(&mut self, at: usize) -> String {
        let name = self.open.text(&Size::Open(1, vec![at]));
        match self.open.known(at) {
            Known::Axis(tensor, axis) => {
                let of = self.of.get(tensor).cloned();
                let of = of.expect("a tensor is written before what needs its size");
                let (start, end) = (*axis as i64, *axis as i64 + 1);
                let ends = vec![Attribute::Int("start", start), Attribute::Int("end", end)];
                self.emit("Shape", vec![of], &name, ends)
            }
            Known::Sum(parts, plus) => {
                let mut sum = None;
                for (times, at) in parts {
                    let known = self.known(*at);
                    let part = self.times(known, *times);
                    sum = Some(match sum {
                        None => part,
                        Some(before) => self.sizes_of("Add", before, part),
                    });
                }
                let sum = sum.unwrap_or_default();
                match plus {
                    0 => sum,
                    plus => {
                        let plus = self.ints(&[*plus]);
                        self.sizes_of("Add", sum, plus)
                    }
                }
            }
        }
    }

    fn times(&mut self, size: String, times: i64) -> String {
        match times {
            1 => size,
            times => {
                let times = self.ints(&[times]);
                self.sizes_of("Mul", size, times)
            }
        }
    }

    fn sizes_of(&mut self, operator: &'static str, a: String, b: String) -> String {
        self.emit(operator, vec![a, b], "size", vec![])
    }

    /// The numbers from 0 on, as many as a size, as I64.
    pub(crate) fn count(&mut self, size: &Size) -> String {
        let size = self.size(size);
        let end = self.emit("Squeeze", vec![size], "size", vec![]);
        let [zero, one] = [0_i64, 1].map(|number| {
            let bytes = number.to_le_bytes().to_vec();
            self.initializer("number", ElementType::I64, &[], bytes)
        });
        self.emit("Range", vec![zero, end, one], "Range", vec![])
    }

    /// A constant that is a count of an open length: its first number and its step.
    fn counted(
        &mut self,
        tensor: &TensorIr,
        start: &Number,
        step: i64,
    ) -> Result<String, DeployError> {
        let sizes = self.sizes(tensor);
        let mut name = self.count(&sizes[0]);
        if step != 1 {
            let step = self.scalar(ScalarIr::Int(step), DType::I64)?;
            name = self.emit("Mul", vec![name, step], "Mul", vec![]);
        }
        if *start != Number::Fixed(0) {
            let start = self.whole(start, DType::I64)?;
            name = self.emit("Add", vec![name, start], "Add", vec![]);
        }
        Ok(match self.element(tensor.dtype, "a count")? {
            ElementType::I64 => name,
            other => self.cast_to(name, other),
        })
    }

    /// The result of a node; of one that is there already if it computes the same under the same name.
    pub(crate) fn emit(
        &mut self,
        operator: &'static str,
        inputs: Vec<String>,
        name: &str,
        attributes: Vec<Attribute>,
    ) -> String {
        self.emit_in("", operator, inputs, name, attributes)
    }

    /// The same, in a domain of operators.
    pub(crate) fn emit_in(
        &mut self,
        domain: &'static str,
        operator: &'static str,
        inputs: Vec<String>,
        name: &str,
        attributes: Vec<Attribute>,
    ) -> String {
        let [output] = self.emit_all_in(domain, operator, inputs, [name], attributes);
        output
    }

    /// The results of a node that has several, in a domain of operators.
    pub(crate) fn emit_all_in<const N: usize>(
        &mut self,
        domain: &'static str,
        operator: &'static str,
        inputs: Vec<String>,
        names: [&str; N],
        attributes: Vec<Attribute>,
    ) -> [String; N] {
        let key = format!("{domain} {operator} {inputs:?} {attributes:?} {names:?}");
        if let Some(same) = self.computed.get(&key) {
            return std::array::from_fn(|at| same[at].clone());
        }
        let outputs = names.map(|name| match name {
            "" => String::new(),
            name => self.unique(name),
        });
        self.computed.insert(key, outputs.to_vec());
        self.push(domain, operator, inputs, outputs.to_vec(), attributes);
        outputs
    }

    fn push(
        &mut self,
        domain: &'static str,
        operator: &'static str,
        inputs: Vec<String>,
        outputs: Vec<String>,
        attributes: Vec<Attribute>,
    ) {
        let first = outputs.iter().find(|output| !output.is_empty());
        let name = format!("{operator} {}", first.map_or("", String::as_str));
        self.nodes.push(OnnxNode {
            name,
            operator,
            domain,
            inputs,
            outputs,
            attributes,
        });
    }

    /// The name of the constants that `write` writes, which it does at the first call with this key.
    pub(crate) fn written_once(
        &mut self,
        key: String,
        write: impl FnOnce(&mut Self) -> String,
    ) -> String {
        if let Some(same) = self.once.get(&key) {
            return same.clone();
        }
        let name = write(self);
        self.once.insert(key, name.clone());
        name
    }

    /// Says under which name the result of an operation is.
    pub(crate) fn set(&mut self, tensor: &TensorIr, name: String) {
        self.of.insert(tensor.id, name);
    }

    /// A tensor that may be no operand: an input, of which shape and dtype are `given`, a parameter or a constant.
    fn unread(&self, id: TensorId, given: &[(Vec<usize>, DType)]) -> Option<TensorIr> {
        let of_constant = || self.graph.constants().find(|(other, _)| *other == id);
        let (shape, dtype) = match self.graph.inputs().iter().position(|input| *input == id) {
            Some(place) => given.get(place).cloned()?,
            None => match self.weights.constants.get(&id) {
                Some(value) => (value.shape.clone(), value.dtype),
                // One that depends on an open size.
                None => of_constant().map(|(_, data)| (data.shape().to_vec(), data.dtype()))?,
            },
        };
        Some(TensorIr {
            id,
            shape: Shape::from(shape),
            status: TensorStatus::ReadOnly,
            dtype,
        })
    }

    /// The model, with its outputs; `given` are shapes and dtypes of the inputs.
    pub(crate) fn finish(
        mut self,
        results: &[TensorId],
        given: &[(Vec<usize>, DType)],
    ) -> Result<Exported, DeployError> {
        let mut outputs = Vec::new();
        let tensors: HashMap<TensorId, TensorIr> = self
            .graph
            .nodes()
            .flat_map(|node| {
                let operation = node.operation();
                let tensors: Vec<_> = operation.inputs().chain(operation.outputs()).collect();
                tensors
            })
            .map(|tensor| (tensor.id, tensor.clone()))
            .collect();
        for (position, id) in results.iter().enumerate() {
            let found = tensors.get(id).cloned();
            let tensor = found.or_else(|| self.unread(*id, given));
            let tensor = tensor.ok_or_else(|| DeployError::Operator {
                operation: "none",
                module: "?".into(),
                why: "a result of the forward pass is not computed by any operation".into(),
            })?;
            let how = self.quantization.results.get(&position).copied();
            let from = self.rounded(&tensor, how, "result")?;
            // A name of its own, whatever else reads it, and if it is a result twice.
            let name = self.unique("output");
            self.push("", "Identity", vec![from], vec![name.clone()], vec![]);
            outputs.push(ValueInfo {
                element: element(tensor.dtype, &name)?,
                shape: self.open.dimensions(&self.sizes(&tensor)),
                name,
            });
        }
        let mut model = OnnxModel {
            nodes: self.nodes,
            initializers: self.initializers,
            inputs: self.inputs,
            outputs,
        };
        model.tidy();
        Ok(Exported {
            model,
            layers: self.layers,
            fixed_batch: self.open.fixed_batch.clone(),
        })
    }
}

/// The bytes of a number as an element.
pub(crate) fn scalar_bytes(value: ScalarIr, element: ElementType) -> Vec<u8> {
    match element {
        ElementType::F32 => value.elem::<f32>().to_le_bytes().to_vec(),
        ElementType::F64 => value.elem::<f64>().to_le_bytes().to_vec(),
        ElementType::F16 => burn::tensor::f16::from_f64(value.elem::<f64>())
            .to_le_bytes()
            .to_vec(),
        ElementType::BF16 => burn::tensor::bf16::from_f64(value.elem::<f64>())
            .to_le_bytes()
            .to_vec(),
        ElementType::Bool => vec![u8::from(value.elem::<bool>())],
        ElementType::I64 => value.elem::<i64>().to_le_bytes().to_vec(),
        ElementType::U64 => value.elem::<u64>().to_le_bytes().to_vec(),
        ElementType::I32 => value.elem::<i32>().to_le_bytes().to_vec(),
        ElementType::U32 => value.elem::<u32>().to_le_bytes().to_vec(),
        ElementType::I16 => value.elem::<i16>().to_le_bytes().to_vec(),
        ElementType::U16 => value.elem::<u16>().to_le_bytes().to_vec(),
        ElementType::U8 => vec![value.elem::<u8>()],
        _ => value.elem::<i8>().to_le_bytes().to_vec(),
    }
}
