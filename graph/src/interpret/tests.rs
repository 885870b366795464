//! Recorded operations, executed on flex, against the same calls made there: equal to the bit.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use burn::backend::ir::{OperationIr, TensorId, TensorIr};
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{
    BackendTensor, Dispatch, DispatchDevice, DispatchTensor, DispatchTensorKind, TensorMetadata,
};
use burn::tensor::{Device, DeviceConfig, TensorData, read_sync};

use super::{Operands, name, run};

/// [`check`] as a row of a table.
macro_rules! check {
    ($expected:literal, $inputs:expr => $compute:expr) => {
        check($expected, $inputs, $compute)
    };
}

mod backward;
mod base;
mod contract;
mod float;
mod int;
mod module;
mod numeric;

/// Operands in a map; float results in the dtype that is declared.
struct Map {
    device: DispatchDevice,
    alive: HashMap<TensorId, DispatchTensor>,
    /// What the current operation has fetched and stored, in order.
    fetched: Vec<TensorId>,
    stored: Vec<TensorId>,
}

impl Map {
    fn new(device: &Device) -> Self {
        Self {
            device: device.as_dispatch().clone(),
            alive: HashMap::new(),
            fetched: vec![],
            stored: vec![],
        }
    }

    fn get(&mut self, tensor: &TensorIr) -> DispatchTensor {
        self.fetched.push(tensor.id);
        self.alive[&tensor.id].clone()
    }

    /// Runs an operation, and looks at what it asked for and stored.
    fn run(&mut self, operation: &OperationIr) {
        self.fetched.clear();
        self.stored.clear();
        run(operation, self).expect("supported");
        if matches!(operation, OperationIr::Init(_)) {
            return;
        }
        let inputs: Vec<_> = operation.inputs().map(|tensor| tensor.id).collect();
        let outputs: Vec<_> = operation.outputs().map(|tensor| tensor.id).collect();
        assert_eq!(self.fetched, inputs, "operands of {}", name(operation));
        assert_eq!(self.stored, outputs, "results of {}", name(operation));
        for out in operation.outputs() {
            assert_eq!(
                self.alive[&out.id].shape(),
                out.shape,
                "{}",
                name(operation)
            );
        }
    }
}

impl Operands for Map {
    fn float(&mut self, tensor: &TensorIr) -> DispatchTensor {
        self.get(tensor)
    }
    fn set(&mut self, tensor: &TensorIr, value: DispatchTensor) {
        self.stored.push(tensor.id);
        self.alive.insert(tensor.id, value);
    }
    fn device(&self) -> DispatchDevice {
        self.device.clone()
    }
}

/// A closure's outputs: one tensor or several.
trait Outputs {
    fn outputs(self) -> Vec<DispatchTensor>;
}

impl Outputs for DispatchTensor {
    fn outputs(self) -> Vec<DispatchTensor> {
        vec![self]
    }
}

impl Outputs for (DispatchTensor, DispatchTensor) {
    fn outputs(self) -> Vec<DispatchTensor> {
        vec![self.0, self.1]
    }
}

impl Outputs for Vec<DispatchTensor> {
    fn outputs(self) -> Vec<DispatchTensor> {
        self
    }
}

struct Recording {
    operations: Vec<OperationIr>,
    constants: BTreeMap<TensorId, TensorData>,
    inputs: Vec<TensorId>,
    outputs: Vec<TensorId>,
}

thread_local! {
    /// Makes ints and bools as flex does.
    static CAPTURE: Device = {
        let settings = Device::flex().settings();
        let capture = Device::capture();
        let config = DeviceConfig::default()
            .float_dtype(settings.float_dtype)
            .int_dtype(settings.int_dtype)
            .bool_dtype(settings.bool_dtype);
        // Outside of a scope it does not know what it supports.
        let configured = capture.capture_scope(|scope| {
            capture.clone().configure(config).expect("not used before");
            scope.complete([], [])
        });
        configured.expect("nothing was recorded");
        capture
    };
}

impl Recording {
    fn new<const N: usize, O: Outputs>(
        capture: &Device,
        inputs: &[TensorData; N],
        compute: impl Fn([DispatchTensor; N]) -> O,
    ) -> Self {
        let mut input_ids = vec![];
        let captured = capture.capture_scope(|scope| {
            let inputs = inputs.each_ref().map(|data| upload(data.clone(), capture));
            input_ids = inputs.iter().map(captured_id).collect();
            let outputs = compute(inputs).outputs();
            scope.complete([], outputs.iter().map(captured_id))
        });
        let captured = captured.expect("a complete recording");
        Self {
            operations: captured.graph.operations,
            constants: captured.values,
            inputs: input_ids,
            outputs: captured.graph.outputs,
        }
    }

    fn execute(&self, map: &mut Map, inputs: Vec<DispatchTensor>) -> Vec<DispatchTensor> {
        let device = Device::from(map.device.clone());
        for (id, data) in &self.constants {
            map.alive.insert(*id, upload(data.clone(), &device));
        }
        map.alive.extend(self.inputs.iter().copied().zip(inputs));
        for operation in &self.operations {
            map.run(operation);
        }
        self.outputs
            .iter()
            .map(|id| map.alive[id].clone())
            .collect()
    }

    /// What was recorded, each with its kind: `float add`.
    fn names(&self) -> BTreeSet<String> {
        let computed = self
            .operations
            .iter()
            .filter(|op| !matches!(op, OperationIr::Init(_)));
        computed
            .map(|op| format!("{} {}", family(op), name(op)))
            .collect()
    }
}

fn family(operation: &OperationIr) -> &'static str {
    use OperationIr::*;
    match operation {
        BaseFloat(_) | NumericFloat(..) | Float(..) => "float",
        BaseInt(_) | NumericInt(..) | Int(_) => "int",
        BaseBool(_) | Bool(_) => "bool",
        Module(_) => "module",
        Activation(_) => "activation",
        Init(_) | Custom(_) | Drop(_) | Distributed(_) => "other",
    }
}

/// Records `compute`, which must give the operation named `expected`, executes the recording on flex
/// and compares the outputs, dtypes included, with those of `compute` on flex.
#[track_caller]
fn check<const N: usize, O: Outputs>(
    expected: &str,
    inputs: [TensorData; N],
    compute: impl Fn([DispatchTensor; N]) -> O,
) {
    let recording = CAPTURE.with(|capture| Recording::new(capture, &inputs, &compute));
    let names = recording.names();
    assert!(
        names.contains(expected),
        "{expected} is not among {names:?}"
    );
    let flex = Device::flex();
    let on_flex = inputs.map(|data| upload(data, &flex));
    let got = recording.execute(&mut Map::new(&flex), on_flex.to_vec());
    let want = compute(on_flex).outputs();
    assert_eq!(got.len(), want.len());
    for (got, want) in got.into_iter().zip(want) {
        assert_eq!(read(got), read(want), "{expected}");
    }
}

fn captured_id(tensor: &DispatchTensor) -> TensorId {
    use BackendTensor::{Bool, Float, Int};
    match &tensor.kind {
        DispatchTensorKind::Capture(Float(t) | Int(t) | Bool(t)) => t.id(),
        _ => panic!("not on the capture device"),
    }
}

fn upload(data: TensorData, device: &Device) -> DispatchTensor {
    let device = device.as_dispatch();
    match data.dtype() {
        dtype if dtype.is_float() => Dispatch::float_from_data(data, device),
        dtype if dtype.is_bool() => Dispatch::bool_from_data(data, device),
        _ => Dispatch::int_from_data(data, device),
    }
}

fn read(tensor: DispatchTensor) -> TensorData {
    let data = match tensor.dtype() {
        dtype if dtype.is_float() => read_sync(Dispatch::float_into_data(tensor)),
        dtype if dtype.is_bool() => read_sync(Dispatch::bool_into_data(tensor)),
        _ => read_sync(Dispatch::int_into_data(tensor)),
    };
    data.expect("a value")
}

/// All different, of both signs, in `(-2, 2)`, in no order.
fn floats<const D: usize>(shape: [usize; D]) -> TensorData {
    let count: usize = shape.iter().product();
    let values = (0..count).map(|i| ((i * 61 + 17) % 997 % 127) as f32 / 32.0 - 1.97);
    TensorData::new(values.collect(), shape)
}

/// The same within `(low, high)`.
fn floats_in<const D: usize>(shape: [usize; D], low: f32, high: f32) -> TensorData {
    let count: usize = shape.iter().product();
    let values =
        (0..count).map(|i| low + (high - low) * (((i * 61 + 17) % 127) as f32 + 0.5) / 127.5);
    TensorData::new(values.collect(), shape)
}

/// From 0 to `below`, in no order; of flex's own dtype.
fn indices<const D: usize>(shape: [usize; D], below: i32) -> TensorData {
    let count = shape.iter().product::<usize>() as i32;
    TensorData::new((0..count).map(|i| (i * 7 + 3) % below).collect(), shape)
}

/// Of both signs, up to beyond what a float of 32 bits counts.
fn ints<const D: usize>(shape: [usize; D]) -> TensorData {
    let count = shape.iter().product::<usize>() as i32;
    let values = (0..count).map(|i| (i * 61 + 17) % 127 - 55 + (i % 3 - 1) * 16_777_217);
    TensorData::new(values.collect(), shape)
}

fn bools<const D: usize>(shape: [usize; D]) -> TensorData {
    let count: usize = shape.iter().product();
    TensorData::new(
        (0..count).map(|i| (i * i + i / 3) % 3 == 1).collect(),
        shape,
    )
}
