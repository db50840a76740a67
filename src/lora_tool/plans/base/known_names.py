"""Whether a base has exactly the parameters of its class, by its headers, without transformers.

A tensor with a common name in a common place may still belong to no model, and a model may lack one. So the names of
every class in the table of architectures are known, as digests: with the defaults of its config, and with each switch
of biases and norms flipped (`attention_bias`). `tests/contract/test_architectures.py` computes them from transformers.
Classes with tied tensors besides the output layer are not among them, and a base that matches none may still be sound:
then transformers decides.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

_LAYER = re.compile(r"\.(\d+)\.")
SWITCH = re.compile("bias|norm")
"""Booleans of a config that add tensors to a class, or take some away, are called so."""


def names_digest(class_name: str, config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return a digest of the class, its parameters' `names` and the switches that are on, for any number of layers.

    `config` is config.json as it was read. None where a stack of layers is not numbered from 0, or is not as long as
    any number in `config` says.
    """
    lines = {class_name, *(f"{name}=true" for name, value in config.items() if value is True and SWITCH.search(name))}
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        layer = _LAYER.search(name)
        if layer is None:
            lines.add(name)
        else:
            stacks[name[: layer.start()]][int(layer[1])].add(name[layer.end() :])
    lengths = {value for value in config.values() if type(value) is int}
    for stack, layers in stacks.items():
        if sorted(layers) != list(range(len(layers))) or len(layers) not in lengths:
            return None
        lines |= {f"{stack}: {' '.join(sorted(layer))}" for layer in layers.values()}
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:10]


_DIGESTS = """
001049c384 00bbd8ca98 0129f113bb 0185f9ec6b 027e34a01a 02db9f3249 0365baaa81 0549d9a065 05529ba2b3 07219df8e8
082f0d646a 095aa1f3ca 09dcb63f9f 0a61dd3b3e 0a8be2c496 0a8f8d2b65 0adf94e923 0b16cb255c 0b8b7dd739 0d12858907
0d6f004a63 0df67bff66 0df9e09d1b 0e08acf7ea 0f20bf04f4 0faa6cbc7d 105cf27cc5 10d46a0364 12112e3246 129c0bb186
1467ad5230 1479012a72 1520400cec 152bf1ae68 15dfc02f6d 17878777af 18fc679f67 198912c395 1ac66f97d1 1b26dc8ae6
1b45e5f381 1b4db3857a 1bc2fc1395 1ca0362f39 1e09dd03b6 1e3e9a7b47 1ea9fe9217 20c96447a1 22a0ca3b60 22fb8213e4
2339612280 2440f9ddca 245b1951ad 257eddadeb 25e460aa49 265d10d25e 26b12d8845 2740ed8f58 27b08dfd0d 29448f68df
296dca3f3a 296ff982fb 2a8870e4c2 2afaba83b2 2b247194a4 2bd4a6c84c 2c020cdc2b 2cabbc7c5d 2cc85f6dec 2cf3a3b2a4
2dabdef802 31a82aaaf3 32213b1a4d 3233db1c6e 32bebfe6f2 32cf8f6117 32e88b468f 34db299b2b 354c3c04a4 36044aa87f
374c8e8901 387dd04557 39081ea49c 3a894993f4 3b1c1a8563 3c33c9b4ea 3d9ed6d2a8 3e3129ee0c 3e7cab4c83 3ec394b5d5
3ee3830bb9 3f0851c87f 418f61a0c4 41f02bedf7 42de6a7bef 432b0d9816 44b1e6222e 45125f6003 45ac5977b5 46808e82c9
4697e2813a 46fa765ae4 47003f40e1 4724a127e1 476f7ac097 47d19f4c6a 483aeafb10 48e1612c45 4a365ef54c 4c64b7e601
4dfec218f0 4f98ae8250 519d2da5f4 51f1bf08dc 5309ae6574 5390ec1724 53b63bc893 53e0048dab 5485c4c239 54dd2f4b98
55156b93d6 563663e5d6 564d22f417 5871e8716d 587a62dd69 5a30e50d15 5a6e1316d1 5b6d594bd1 5bcc244827 5bf9c61262
5d4c17b807 5d92f1877d 5d99398597 5ee96bec01 5f5a44cbce 61e80ae0a3 62015eb299 6268361323 62a06d6aa8 63680dc794
65be582db7 66e9c7f61e 6879a96a21 698a3af5c4 69a4634b94 6a1ed5106c 6a2324d000 6a83a9c0b6 6b8c2e737f 6ba24e50bb
6c38d6955d 6d55548fcf 6ec26e0ba1 6f0ef3bee8 6fcf4c16e0 706a7f78aa 70af4912f8 71b8e61cb0 73e2288539 743074168c
74546bf378 7612d82e0a 7622a288ae 777fc0625b 7783f2da04 7799a1e441 784e7acab5 789ce4ca31 79165c06d8 793f3101e7
7983c4dc51 7a1acf6b26 7a83c83217 7bcb9128a7 7bd377f591 7c305dd17c 7ee2182e03 7f1a2970f9 80289c0d7a 81cc2ce707
82101b7286 821f05e5fa 8253e993c8 8509db13f8 86ff57d8b2 879df7f196 87e3ce6b30 891bc828f7 8939feb1a9 89861b89e4
89a48ae46a 8cd55178bb 8d2b064121 8e1678cb66 8ec53ee18b 9084407384 9223800fe8 92434c5abd 92bb95a787 93b32cc5c0
940ef4a0d6 943e379021 95bf846bb2 95c4d7f3f3 96c75a247f 96ee9036e0 9857d8496d 98888d6660 98bf70f2d0 98fd184fd9
9c218c63f2 9cb627a0b6 9e6125d97d 9f514e9c63 a023e902ea a118b02046 a14e795777 a2cc8b50c6 a2fcc7f716 a46842d03d
a59e7647a1 a65d54d6ed a661c1c05e a6af7adb7c a6fbf17d0b a74d876794 a861bc83d9 ab2786137f ab6ca2209b ab73f70ebb
ac23243c53 ad46c63533 ae1c4946b3 ae8328dea2 b05a5b1975 b0f54ae033 b2c7b51a61 b3b0ac2fe7 b400452743 b60845e246
b66ea7e23e b71524cb59 b860a84e94 b8cca08968 ba3abbabf4 bae3020deb bb6f08f62d bc0f7d708f bcc9700087 bd1ff6e79a
bde3486c29 bffa9901bd c1000b7cb5 c104f6d48b c222b8ce85 c24c5b2166 c2c60487c2 c3ea71f4a9 c4c6e1e60d c5023874a0
c66a53551f c66b88f065 c75faf2790 c7eac59b17 c80c132e89 c8d4f8ea69 c8ea350618 c938fcd949 c9504f2cb0 c9e4a42516
cb05e3fb75 cb27bd1b61 cbb38b8102 cc189a9123 cc3a83275b cda3b64351 cf122a0e4b cfbbc05d02 cfbc1a645c cfcdbbbfb7
d087f08b40 d22470ed54 d2af14e50b d3f49a9bf2 d4cd8d961f d529664e83 d666c79ebe d682a3cc93 d706189cc1 d7873ddf5f
d8653c7cc2 da80501c23 dacb49703c dae2dbd2a8 dae9fd76a6 dc9ae515c2 de9299fa99 dfc7756e7c e10caf89aa e2af45ea7e
e31cbfeb7b e36a093e29 e379315980 e5f336af76 e62b213774 e85a58ab80 e89e43738b ea3a9c6478 eb2354df4c eb3119c540
ec8224ad8a ecb13df8c5 ed109bbb16 ee22b0e776 ef4301ff17 efaffd913f f090657bfd f0f228bc44 f14b139081 f22d799d6d
f2bd7cb47c f2c38d7036 f47cb7c964 f6916eb8d0 f6a0a941a1 f6cf2958ba f71fc44bb6 f758edd1c4 f779dd81ad f784beec73
f789d59ec5 f7dc15c116 f91f119c90 f9cb05a344 fa65d11e5b fa880da5e4 fabf62c5f3 fb3415a0b4 fce8e5dffb fd0b1c094d
fd634af2b9 fdb24a19dd ff797d4201
"""
KNOWN_NAMES = frozenset(_DIGESTS.split())
"""Digests of the classes in `ARCHITECTURES`, without the tensors of the output layer, as transformers 5.23 saves them."""
