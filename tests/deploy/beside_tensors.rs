//! Engines tell inputs apart by more than their tensors: numbers and variants beside them.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::deploy::{Backend, DeployError, EngineConfig, Export};

use crate::judge::close;
use crate::support::{tensor, with_numbers};

#[derive(Module, Debug)]
struct Layer {
    fc: Linear,
}

impl Layer {
    fn new(device: &Device) -> Self {
        let fc = LinearConfig::new(6, 4).init(device);
        with_numbers(Self { fc }, 3)
    }

    /// Rows from a place on, divided by a temperature.
    fn forward(&self, (x, at, temperature): (Tensor<2>, usize, f32)) -> Tensor<2> {
        self.fc.forward(x.narrow(0, at, 2)).div_scalar(temperature)
    }

    fn gated(&self, (x, gate): (Tensor<2>, Option<Tensor<2>>)) -> Tensor<2> {
        match gate {
            Some(gate) => self.fc.forward(x * gate),
            None => self.fc.forward(x),
        }
    }
}

#[test]
fn numbers_beside_tensors_are_those_of_a_recording() {
    let device = Device::flex();
    let layer = Layer::new(&device);
    let x = tensor::<2>(5, [4, 6], &device);
    for backend in [
        None,
        Some(Backend::Own),
        Some(Backend::Rten),
        Some(Backend::Burn),
    ] {
        let record = |at, temperature| {
            let inputs = (x.clone(), at, temperature);
            Export::record(&layer, &inputs, Layer::forward).unwrap()
        };
        let config = EngineConfig::new().with_backend(backend);
        let mut engine = config.compile(record(0, 1.0)).unwrap();
        let run = |engine: &burn_lean::deploy::Engine<Tensor<2>>, at: usize, temperature: f32| {
            engine.run(&(x.clone(), at, temperature))
        };
        let expected = |at, temperature| layer.forward((x.clone(), at, temperature));
        close(run(&engine, 0, 1.0).unwrap(), expected(0, 1.0));
        for (at, temperature) in [(1, 1.0), (0, 2.0)] {
            let refused = run(&engine, at, temperature).unwrap_err();
            assert!(matches!(refused, DeployError::Mismatch { .. }), "{refused}");
            assert!(
                refused.to_string().contains("beside the tensors"),
                "{refused}"
            );
        }
        engine.add(record(1, 2.0)).unwrap();
        close(run(&engine, 1, 2.0).unwrap(), expected(1, 2.0));
        close(run(&engine, 0, 1.0).unwrap(), expected(0, 1.0));
    }
}

#[test]
fn an_option_is_another_recording_where_it_is_none() {
    let device = Device::flex();
    let layer = Layer::new(&device);
    let (x, gate) = (
        tensor::<2>(5, [4, 6], &device),
        tensor::<2>(6, [4, 6], &device),
    );
    let with = (x.clone(), Some(gate));
    let without = (x, None);
    let config = EngineConfig::new().with_backend(Some(Backend::Own));
    let mut engine = config
        .compile(Export::record(&layer, &with, Layer::gated).unwrap())
        .unwrap();
    assert_matches!(engine.run(&without), Err(DeployError::Mismatch { .. }));
    let other = Export::record(&layer, &without, Layer::gated).unwrap();
    engine.add(other).unwrap();
    close(engine.run(&without).unwrap(), layer.gated(without.clone()));
    close(engine.run(&with).unwrap(), layer.gated(with.clone()));
}
