//! Finding a reparameterization inside of chains whose other links the caller does not know.
//!
//! Burn hands out what a parameter carries only to those who name its type. A [`Chain`] of a mask
//! of one crate and a quantizer of another has a type that neither crate can name. So chains
//! register here when they are made, with a function that looks into them.

use std::any::{Any, TypeId};
use std::sync::{PoisonError, RwLock};

use burn::module::{Param, Reparameterization};
use burn::tensor::Tensor;

use crate::Chain;

/// How to look into one type of chain.
#[derive(Clone, Copy)]
struct Registered {
    chain: fn() -> TypeId,
    /// The chain that a `Param<Tensor<D>>`, whatever its rank, carries.
    carried: fn(&dyn Any) -> Option<&dyn Any>,
    /// The link of a type inside of the chain.
    link: fn(&dyn Any, TypeId) -> Option<&dyn Any>,
}

static CHAINS: RwLock<Vec<Registered>> = RwLock::new(Vec::new());

fn registered() -> Vec<Registered> {
    CHAINS
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .clone()
}

/// The reparameterization of type `R` that a parameter carries, alone or as a link of a
/// [`Chain`], also of nested ones.
///
/// Chains made by a [`ChainReparameterizer`](crate::ChainReparameterizer) or by [`Chain::new`] can
/// be looked into.
///
/// ```
/// use burn::module::{Lora, LoraAdapter};
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_lean_reparam::{ChainReparameterizer, attach, find};
///
/// let linear = LinearConfig::new(4, 2).init(&Device::flex());
/// let nested = ChainReparameterizer::new(Lora::new(1, 1.0), Lora::new(2, 1.0));
/// let linear = attach(linear, ChainReparameterizer::new(nested, Lora::new(3, 1.0))).unwrap();
/// // The first that acts on the base.
/// let adapter: &LoraAdapter = find(&linear.weight).unwrap();
/// assert_eq!(adapter.a.dims(), [4, 1]);
/// ```
pub fn find<R: Reparameterization, const D: usize>(parameter: &Param<Tensor<D>>) -> Option<&R> {
    if let Some(found) = parameter.reparameterization::<R>() {
        return Some(found);
    }
    registered().iter().find_map(|registered| {
        let chain = (registered.carried)(parameter)?;
        (registered.link)(chain, TypeId::of::<R>())?.downcast_ref()
    })
}

/// Makes chains of this type known to [`find`].
pub(crate) fn register<A, B>()
where
    A: Reparameterization + burn::module::ModuleDisplay,
    B: Reparameterization + burn::module::ModuleDisplay,
{
    let chain = TypeId::of::<Chain<A, B>>;
    let known = |all: &[Registered]| all.iter().any(|known| (known.chain)() == chain());
    if known(&registered()) {
        return;
    }
    let mut chains = CHAINS.write().unwrap_or_else(PoisonError::into_inner);
    if !known(&chains) {
        chains.push(Registered {
            chain,
            carried: carried::<Chain<A, B>>,
            link: link::<A, B>,
        });
    }
}

/// What a parameter of any rank that Burn can visit carries, if it is of type `C`.
fn carried<C: Reparameterization>(parameter: &dyn Any) -> Option<&dyn Any> {
    fn of_rank<C: Reparameterization, const D: usize>(parameter: &dyn Any) -> Option<&dyn Any> {
        let parameter: &Param<Tensor<D>> = parameter.downcast_ref()?;
        Some(parameter.reparameterization::<C>()?)
    }
    of_rank::<C, 1>(parameter)
        .or_else(|| of_rank::<C, 2>(parameter))
        .or_else(|| of_rank::<C, 3>(parameter))
        .or_else(|| of_rank::<C, 4>(parameter))
        .or_else(|| of_rank::<C, 5>(parameter))
        .or_else(|| of_rank::<C, 6>(parameter))
        .or_else(|| of_rank::<C, 7>(parameter))
        .or_else(|| of_rank::<C, 8>(parameter))
        .or_else(|| of_rank::<C, 9>(parameter))
}

fn link<A, B>(chain: &dyn Any, wanted: TypeId) -> Option<&dyn Any>
where
    A: Reparameterization + burn::module::ModuleDisplay,
    B: Reparameterization + burn::module::ModuleDisplay,
{
    let chain: &Chain<A, B> = chain.downcast_ref()?;
    let first = chain.first.as_ref();
    first
        .and_then(|first| inside(first, wanted))
        .or_else(|| inside(chain.second.as_ref()?, wanted))
}

/// The link itself, if it is of the wanted type, or the one inside of it, if it is a chain.
pub(crate) fn inside(link: &dyn Any, wanted: TypeId) -> Option<&dyn Any> {
    if link.type_id() == wanted {
        return Some(link);
    }
    let registered = registered();
    let nested = registered
        .iter()
        .find(|registered| (registered.chain)() == link.type_id())?;
    (nested.link)(link, wanted)
}
