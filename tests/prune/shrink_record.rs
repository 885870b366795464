//! Records of shrunk models, loaded into models of the original sizes.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::store::ModuleRecord;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{PruneError, Shrink, load_shrunk};

use crate::support::{farthest, on_each, tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    hidden: Linear,
    head: Linear,
}

impl Net {
    fn new(layout: LinearLayout, seed: u64, device: &Device) -> Self {
        let model = Self {
            conv: Conv2dConfig::new([2, 8], [3, 3]).init(device),
            norm: BatchNormConfig::new(8).init(device),
            hidden: LinearConfig::new(8, 12).with_layout(layout).init(device),
            head: LinearConfig::new(12, 3).with_layout(layout).init(device),
        };
        with_numbers(model, seed)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv.forward(x)));
        let [examples, channels, ..] = x.dims();
        let x = x.mean_dim(3).mean_dim(2).reshape([examples, channels]);
        self.head.forward(relu(self.hidden.forward(x)))
    }

    fn batch(device: &Device) -> Tensor<4> {
        tensor(9, [4, 2, 6, 6], device)
    }
}

/// As it is read from a file.
fn file(model: Net) -> ModuleRecord {
    let bytes = model.into_record().into_bytes().unwrap();
    ModuleRecord::from_bytes(bytes).unwrap()
}

#[test]
fn a_new_model_takes_the_sizes_of_the_record_with_its_running_statistics() {
    on_each(|device| {
        for layout in [LinearLayout::Row, LinearLayout::Col] {
            let x = || Net::batch(device);
            let shrunk = Shrink::to(0.4)
                .shrink(Net::new(layout, 3, device), Net::forward, x())
                .unwrap();
            assert!(shrunk.report.removed() > 4, "{}", shrunk.report);
            let small = shrunk.model;
            let expected = values(small.forward(x()));
            let parameters = small.num_params();

            let new = Net::new(layout, 4, device);
            // Of a weight in column layout Burn forgets the recorded shape once it was used.
            new.forward(x());
            let loaded = load_shrunk(new, file(small)).unwrap();
            assert_eq!(loaded.num_params(), parameters);
            // Columns that lie apart are summed in another order.
            let found = values(loaded.forward(x()));
            let off = farthest(&found, &expected);
            assert!(off < 1e-6, "{found:?} {expected:?}");
        }
    });
}

#[test]
fn what_was_frozen_stays_so_and_the_rest_trains() {
    on_each(|device| {
        let training = device.clone().autodiff();
        let x = || Net::batch(&training);
        let small = Shrink::to(0.4)
            .shrink(Net::new(LinearLayout::Row, 3, &training), Net::forward, x())
            .unwrap()
            .model;
        let mut new = Net::new(LinearLayout::Row, 4, &training);
        new.conv = new.conv.no_grad();
        let loaded = load_shrunk(new, file(small)).unwrap();
        let gradients = loaded.forward(x()).square().sum().backward();
        assert!(loaded.conv.weight.grad(&gradients).is_none());
        let gradient = loaded.head.weight.grad(&gradients).unwrap();
        assert_eq!(gradient.dims(), loaded.head.weight.dims());
        assert!(values(gradient).iter().any(|g| *g != 0.0));
    });
}

#[test]
fn the_record_of_another_model_is_an_error_and_the_model_is_as_before() {
    on_each(|device| {
        let x = || Net::batch(device);
        let model = Net::new(LinearLayout::Row, 3, device);
        let before = values(model.forward(x()));
        let mut larger = Net::new(LinearLayout::Row, 4, device);
        larger.head = LinearConfig::new(13, 3).init(device);
        let (model, error) = load_shrunk(model, file(larger)).unwrap_err().into_parts();
        assert_eq!(
            error,
            PruneError::RecordOfAnotherModel {
                path: "head.weight".into(),
                record: Some(vec![13, 3]),
                model: Some(vec![12, 3]),
            }
        );
        assert_eq!(values(model.forward(x())), before);

        let linear = LinearConfig::new(2, 2).init(device).into_record();
        let (model, error) = load_shrunk(model, linear).unwrap_err().into_parts();
        assert_matches!(error, PruneError::Record { .. });
        assert_says!(error, "conv.weight");
        assert_eq!(values(model.forward(x())), before);
    });
}
