//! Hooks at the sites of a recurrence.

use burn::backend::ir::TensorId;
use burn::nn::LstmConfig;
use burn::tensor::{Device, Tensor};

use super::{LOOKS, insert};
use crate::{Graph, HookInfo, Role, Site, record};

/// An LSTM over so many steps, with a hook at the input and the output of each layer, and how many operations
/// were looked at for that.
fn hooked(steps: usize) -> (Graph, usize) {
    let device = Device::flex();
    let lstm = LstmConfig::new(2, 3, true).init(&device);
    let x = Tensor::<3>::ones([1, steps, 2], &device);
    let recording = record(&lstm, &x, |lstm, x| lstm.forward(x, None).0).unwrap();
    let mut graph = recording.graph().clone();
    let uses = graph.sites().into_iter();
    let acts = |site: &Site| matches!(site.role, Role::Input | Role::Output);
    let mut sites: Vec<Site> = uses.map(|one| one.site).filter(acts).collect();
    sites.sort();
    sites.dedup();
    let hook = |site: Site| HookInfo {
        path: site.to_string(),
        site: Some(site),
        name: "hook",
        takes_zeros: false,
        takes_parts: false,
        is_called: false,
    };
    graph.hooks = sites.into_iter().map(hook).collect();
    LOOKS.set(0);
    insert(&mut graph);
    (graph, LOOKS.get())
}

#[test]
fn hooks_of_a_longer_recurrence_take_as_much_more_work() {
    let [short, middle, long] = [8, 16, 24].map(|steps| hooked(steps).1);
    assert!(long > middle && middle > short);
    assert_eq!(long - middle, middle - short);
}

#[test]
fn what_a_layer_gives_is_read_by_its_hook_alone() {
    let (graph, _) = hooked(6);
    let reads = |id: TensorId| {
        let all = graph.operations.iter();
        all.filter(|one| one.inputs().any(|input| input.id == id))
            .count()
    };
    let mut outputs = 0;
    for operation in &graph.operations {
        let Some(hook) = graph.hook_of(operation) else {
            continue;
        };
        let site = graph.hooks[hook].site.as_ref();
        if site.is_some_and(|site| site.role == Role::Output) {
            outputs += 1;
            assert_eq!(
                operation.inputs().map(|input| reads(input.id)).max(),
                Some(1)
            );
        }
    }
    // Eight layers in each step.
    assert_eq!(outputs, 8 * 6);
}
