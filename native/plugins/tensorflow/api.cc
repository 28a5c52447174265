#include "plugins/tensorflow/api.h"

#include <dlfcn.h>

#include <initializer_list>

namespace farandole::tensorflow {

Api tf;

const char* resolve() {
  // From 2.19 on the symbols are global. Older versions load them in a library with local symbols.
  void* const framework = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  const char* missing = nullptr;
  const auto find = [&](const char* name) {
    void* found = dlsym(RTLD_DEFAULT, name);
    if (found == nullptr && framework != nullptr) found = dlsym(framework, name);
    if (found == nullptr && missing == nullptr) missing = name;
    return found;
  };
#define FARANDOLE_TF_FIND(result, name, arguments) tf.name = reinterpret_cast<result(*) arguments>(find("TF_" #name));
  FARANDOLE_TF_API(FARANDOLE_TF_FIND)
#undef FARANDOLE_TF_FIND
  return missing;
}

}  // namespace farandole::tensorflow
