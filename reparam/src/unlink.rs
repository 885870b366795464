//! Taking links off a chain.
//!
//! Burn hands mappers the base of a parameter and puts what it carries back unchanged. So the chain
//! takes part: while a walk of this module is under way on this thread, it asks whether its first
//! link goes.

use std::any::TypeId;
use std::cell::RefCell;

use burn::module::{Module, ModuleMapper, Reparameterization};

use crate::Chain;
use crate::find::inside;

/// The model without the links that act before the one of type `R`, on the parameters that
/// `chosen` names by path.
///
/// The base stays as it is: what those links did to it must be part of it by now, as it is in a
/// weight that was quantized behind its pruning mask. What acts after `R` stays, and so do
/// parameters that carry no chain or no `R`. Knows the chains that [`find`](crate::find()) knows.
///
/// ```
/// use burn::module::{Lora, LoraAdapter};
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_lean_reparam::{Chain, ChainReparameterizer, attach, unlink_before};
///
/// let linear = LinearConfig::new(4, 2).init(&Device::flex());
/// let nested = ChainReparameterizer::new(Lora::new(1, 1.0), Lora::new(2, 1.0));
/// let linear = attach(linear, nested).unwrap();
/// // Both links are of the wanted type: nothing acts before the first of them.
/// let linear = unlink_before::<LoraAdapter, _>(linear, |path| path == "weight");
/// let chain = linear.weight.reparameterization::<Chain<LoraAdapter, LoraAdapter>>().unwrap();
/// assert!(chain.first.is_some() && chain.second.is_some());
/// ```
pub fn unlink_before<R: Reparameterization, M: Module>(
    model: M,
    chosen: impl Fn(&str) -> bool,
) -> M {
    /// Puts the outer walk back, also after a panic of the model's.
    struct Scope(Option<Walk>);
    impl Drop for Scope {
        fn drop(&mut self) {
            WALK.set(self.0.take());
        }
    }
    let walk = Walk {
        wanted: TypeId::of::<R>(),
        on_chosen: false,
    };
    let _scope = Scope(WALK.replace(Some(walk)));
    model.map(&mut Follow {
        path: Vec::new(),
        carried: 0,
        chosen,
    })
}

#[derive(Clone, Copy)]
struct Walk {
    /// The type before which links are taken off.
    wanted: TypeId,
    /// Whether what is mapped now is carried by a chosen parameter.
    on_chosen: bool,
}

thread_local! {
    static WALK: RefCell<Option<Walk>> = const { RefCell::new(None) };
}

/// Asked by a chain that is mapped: whether its first link goes.
pub(crate) fn takes_off_first<A, B>(chain: &Chain<A, B>) -> bool
where
    A: Reparameterization,
    B: Reparameterization,
{
    fn holds<R: Reparameterization>(link: &Option<R>, wanted: TypeId) -> bool {
        link.as_ref()
            .is_some_and(|link| inside(link, wanted).is_some())
    }
    let walk = WALK.with_borrow(|walk| *walk);
    walk.is_some_and(|walk| {
        walk.on_chosen && !holds(&chain.first, walk.wanted) && holds(&chain.second, walk.wanted)
    })
}

/// Tracks the path of the parameter.
struct Follow<F> {
    path: Vec<String>,
    /// How many reparameterizations the walk is inside of.
    carried: usize,
    chosen: F,
}

impl<F: Fn(&str) -> bool> Follow<F> {
    fn tell(&self, on_chosen: bool) {
        WALK.with_borrow_mut(|walk| {
            if let Some(walk) = walk {
                walk.on_chosen = on_chosen;
            }
        });
    }
}

impl<F: Fn(&str) -> bool> ModuleMapper for Follow<F> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == "Reparameterization" {
            if self.carried == 0 {
                self.tell((self.chosen)(&self.path.join(".")));
            }
            self.carried += 1;
        }
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.pop();
        if container_type == "Reparameterization" {
            self.carried -= 1;
            if self.carried == 0 {
                self.tell(false);
            }
        }
    }
}
